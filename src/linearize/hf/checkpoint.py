"""Read teachers and write students as ordinary Hugging Face folders."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from jaxtyping import Int64
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, modeling_gguf_pytorch_utils
from transformers import PreTrainedTokenizerBase as Tokenizer

# Imported from its own module: older versions need torchvision for the public name.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file

from linearize.base import UserError, read_json, sync, writing
from linearize.hf.architectures import drops_soft_cap
from linearize.hf.config_json import read_contents
from linearize.hf.gguf_file import gguf_file, load_gguf, load_gguf_tokenizer, read_gguf_config
from linearize.hf.layouts import keep_documents_apart
from linearize.hf.strict_loading import load_whole

_TOKENIZER_FILES = ("tokenizer.*", "vocab.*", "*.model", "tekken.json")
_TOKENIZER_SETTINGS = ("*token*.json",)
_GIT_LFS = b"version https://git-lfs"  # first bytes of a pointer
_MOST_LAYERS = 10_000
FLOATS = ("F16", "BF16", "F32", "F64")  # of safetensors


def read_config(model: str) -> dict[str, Any]:
    """Return the contents of a model's ``config.json``, of a local folder or hub id, or the config of a GGUF file.

    Raises:
        UserError: no such folder, a folder that is not a model, a hub id that cannot be read, a GGUF file that
            `gguf_file` or `read_gguf_config` refuses, or contents that `_refuse_contents` refuses.
    """
    folder = Path(model)
    if (gguf := gguf_file(model)) is not None:
        config = read_gguf_config(gguf)
        _refuse_contents(str(gguf), config)
        return config
    if folder.is_dir():
        path = folder / "config.json"
        if not path.is_file():
            raise UserError(f"model: expected a folder with a config.json, found none in {model!r}; is it a model?")
        _refuse_pointer(path)
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"model: {path}: expected JSON, found {error}") from None
        if not isinstance(config, dict):
            raise UserError(f"model: {path}: expected a JSON object, found {type(config).__name__}")
        _refuse_contents(str(path), config)
        return config
    if folder.exists():
        raise UserError(f"model: expected a folder, a .gguf file or a hub id, found the file {model!r}")
    # A hub id has at most one slash. If the part before it is a local folder, this is a path.
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or ("/" in model and folder.parent.is_dir()):
        raise UserError(f"model: expected a model folder, found nothing at {model!r}; check the path")
    try:
        config, _ = PreTrainedConfig.get_config_dict(model, **hub_options(model))
    except Exception as error:  # the hub client raises many kinds of errors if it cannot read a model
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"model: no folder {model!r}, and the hub gave no config for it: {reason}") from None
    _refuse_contents(model, config)
    return config


def _refuse_pointer(path: Path) -> None:
    """Raise UserError if a file is a git-lfs pointer, not the file itself."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_GIT_LFS)) == _GIT_LFS:
            raise UserError(
                f"{path}: expected the file itself, found a git-lfs pointer to it; run `git lfs pull` in its folder"
            )


def _refuse_contents(where: str, config: dict[str, Any]) -> None:
    """Raise UserError if a config makes transformers fetch code, or build millions of layers."""
    for name in ("attn_implementation", "experts_implementation"):
        found = config.get(name)
        if found is not None and (not isinstance(found, str) or "/" in found):
            raise UserError(
                f"model: {where}: {name}: expected a name that transformers knows, found {found!r:.200}, for which it "
                "would fetch code from the hub; remove it from the file"
            )
    for name in ("num_hidden_layers", "n_layer"):  # transformers makes a module for each
        if isinstance(layers := config.get(name), int) and layers > _MOST_LAYERS:
            raise UserError(f"model: {where}: {name}: expected at most {_MOST_LAYERS:,} layers, found {layers:,}")


def hub_options(model: str) -> dict[str, Any]:
    """Return options for loading by transformers: if the hub cannot be reached, use only its local cache.

    The hub is tried once, without the client's retries, which take most of a minute.
    """
    return {} if Path(model).is_dir() or _hub_answers(model) else {"local_files_only": True}


@functools.cache
def _hub_answers(model: str) -> bool:
    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=5)
    except (HfHubHTTPError, HFValidationError):  # transformers reports these errors
        return True
    except Exception:  # versions of the client raise different errors without a network
        return False
    return True


_UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError)


@contextmanager
def readable(
    model: str, expected: str, raised: type[Exception] | tuple[type[Exception], ...] = _UNREADABLE
) -> Iterator[None]:
    """Turn errors of reading a model's files, in the `with` block, into one UserError of one line.

    Args:
        expected: what the files should be, for the message.
        raised: kinds of errors to turn; `Exception` if the block runs third-party code alone.
    """
    try:
        yield
    except UserError:
        raise
    except raised as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"model {model}: expected {expected}; {reason}") from None


CAUSAL = "AutoModelForCausalLM"


def load_model(model: str, *, dtype: torch.dtype, device: torch.device, auto_class: str = CAUSAL) -> PreTrainedModel:
    """Load a model, softmax or linearized, by an Auto class of transformers, in eval mode.

    Weights are read from safetensors, or widened from a GGUF file, but never from pickles, which can run code.

    Raises:
        UserError: weights are missing, left over (see `load_whole`) or unreadable, or the config is not supported.
    """
    if (gguf := gguf_file(model)) is not None:
        read_config(model)
        with readable(model, "readable weights"), _bars_on_terminals_only(), _same_new_heads():
            loaded: Any = load_gguf(gguf, dtype=dtype, auto_class=auto_class)
        return as_trained(loaded.to(device).eval())
    if Path(model).is_dir():
        read_config(model)
    check_weight_files(Path(model))
    load = getattr(transformers, auto_class).from_pretrained
    with readable(model, "readable weights"), _bars_on_terminals_only(), _same_new_heads():
        options = {"dtype": dtype, "trust_remote_code": False, "use_safetensors": True} | hub_options(model)
        loaded, _ = load_whole(load, model, **options)
        _check_dtypes(model, loaded)
    return as_trained(loaded.to(device).eval())


@contextmanager
def _same_new_heads() -> Iterator[None]:
    """Use one fixed seed for the weights of a head that the checkpoint does not contain."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def check_weight_files(folder: Path) -> None:
    """Check that a local folder has all its safetensors files, and that all are whole. A hub id is not checked.

    Raises:
        UserError: a file is missing or damaged (its name is given), or weights are stored as a pickle only.
    """
    if not folder.is_dir():
        return
    index, names = folder / SAFE_WEIGHTS_INDEX_NAME, [SAFE_WEIGHTS_NAME]
    if not (folder / SAFE_WEIGHTS_NAME).is_file():
        if not index.is_file():
            _refuse_without_safetensors(folder)
        _refuse_pointer(index)
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (AttributeError, KeyError, TypeError):
            raise UserError(
                f"{index}: expected a weight_map from tensors to files, found none; copy it again"
            ) from None
    for path in (folder / name for name in names):
        if not path.is_file():
            raise UserError(
                f"model {folder}: expected {path.name}, which {index.name} names, found none; copy it again"
            )
        _refuse_pointer(path)
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: expected a whole safetensors file, found {error}; copy it again") from None


def _refuse_without_safetensors(folder: Path) -> NoReturn:
    pickles, ggufs, others = (sorted(folder.glob(f"*.{kind}")) for kind in ("bin", "gguf", "safetensors"))
    if others:
        found = others[0].name + (f" and {len(others) - 1} more" if others[1:] else "")
        raise UserError(
            f"model {folder}: expected {SAFE_WEIGHTS_NAME}, or {SAFE_WEIGHTS_INDEX_NAME} with {found}, "
            "found neither; copy the missing file into the folder"
        )
    if ggufs:
        raise UserError(
            f"model {folder}: expected weights (*.safetensors), found {ggufs[0].name}; to use it, name the file: "
            f"--model {ggufs[0]}"
        )
    if not pickles:
        raise UserError(
            f"model {folder}: expected weights (*.safetensors), found none; copy {SAFE_WEIGHTS_NAME}, or all shards "
            "and their index, into the folder"
        )
    raise UserError(
        f"model {folder}: expected weights as safetensors, found {pickles[0].name}, a pickle, which can run code; if "
        "you trust it, load it by AutoModelForCausalLM.from_pretrained(FOLDER, use_safetensors=False), and give "
        "the folder that save_pretrained writes"
    )


def _check_dtypes(model: str, loaded: PreTrainedModel) -> None:
    """Check that weights are stored as floating point numbers: transformers would convert integers silently.

    Raises:
        UserError: weights are quantized, and no config says how.
    """
    if getattr(loaded, "is_quantized", False):
        return
    weights = {name for name, parameter in loaded.named_parameters() if parameter.is_floating_point()}
    for path in Path(str(cached_file(model, "config.json", **hub_options(model)))).parent.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in weights & set(file.keys()):
                if (dtype := file.get_slice(name).get_dtype()) not in FLOATS:
                    raise UserError(
                        f"model {model}: expected {name} as {', '.join(FLOATS)}, found {dtype}; weights that are "
                        "quantized need a quantization_config in config.json"
                    )


def new_model(
    model: str, *, dtype: torch.dtype, device: torch.device, seed: int, auto_class: str = CAUSAL
) -> PreTrainedModel:
    """Make a model with the config of `model` and random weights from `seed`; no weights of `model` are read.

    Raises:
        UserError: no such model.
    """
    contents = read_config(model)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if gguf_file(model) is not None:
            config = read_contents(contents)
        else:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False, **hub_options(model))
        made: Any = getattr(transformers, auto_class).from_config(config, dtype=torch.float32)
    return as_trained(made.to(device, dtype).eval())


def as_trained(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, changed in place so that attention has its soft cap and stays within each packed document."""
    if drops_soft_cap(model.config):
        model.set_attn_implementation("eager")
    keep_documents_apart(model)
    return model


def load_tokenizer(model: str) -> Tokenizer:
    """Load the tokenizer from a model's folder or hub id, or from its GGUF file.

    Raises:
        UserError: there is none, or it cannot be read; the message names the file at fault.
    """
    if (gguf := gguf_file(model)) is not None:
        with readable(model, "a tokenizer that transformers can read from a GGUF file", Exception):
            return load_gguf_tokenizer(gguf)
    with readable(model, "a tokenizer in the folder of the weights", Exception):
        try:
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False, **hub_options(model))
            tokenizer("a")  # errors in its config appear only at first use
        except Exception:
            if Path(model).is_dir():
                _check_tokenizer_files(Path(model))
            raise
        return tokenizer


def _check_tokenizer_files(folder: Path) -> None:
    """Raise UserError if the files of a tokenizer that cannot be loaded are missing or damaged."""
    paths = {path for name in (*_TOKENIZER_FILES, *_TOKENIZER_SETTINGS) for path in folder.glob(name)}
    for path in sorted(paths):
        _refuse_pointer(path)
        if path.suffix != ".json":
            continue
        try:
            contents = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"{path}: expected a whole JSON file, found one that is cut off or damaged ({error}); copy it again"
            ) from None
        if path.name == "tokenizer.json" and not (isinstance(contents, dict) and contents.get("model")):
            raise UserError(f"{path}: expected a tokenizer of the library tokenizers, found none in it; copy it again")
    if not any(next(folder.glob(name), None) for name in _TOKENIZER_FILES):
        raise UserError(
            f"model {folder}: expected a tokenizer in the folder of the weights, found none; copy its files, such as "
            "tokenizer.json, from the model that this one was made from"
        )


def check_tokens(ids: Int64[Tensor, ...], vocab_size: int) -> None:
    """Raise UserError if a token has no embedding: the tokenizer is of another model, or tokens were added to it."""
    if ids.numel() and (largest := int(ids.max())) >= vocab_size:
        raise UserError(
            f"tokenizer: expected tokens below the model's vocab_size of {vocab_size}, found {largest}; use the "
            "model's own tokenizer, or resize the model's embeddings"
        )


def load_image_processor(model: str) -> Any:
    """Load the image processor of a vision model from its preprocessor_config.json.

    Raises:
        UserError: there is no such file.
    """
    with readable(model, "a preprocessor_config.json in the folder of the weights", Exception):
        # The PIL backend needs no torchvision, so results are equal on all machines.
        return AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=False, **hub_options(model))


@contextmanager
def atomic_folder(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder for `num_bytes` bytes; it becomes `folder` if the block succeeds, else it is deleted.

    Raises:
        UserError: as `base.writing`.
    """
    scratch = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with writing(folder, num_bytes):
            scratch.mkdir(parents=True)
            yield scratch
            for path in scratch.rglob("*"):
                if path.is_file():
                    sync(path)
            shutil.rmtree(folder, ignore_errors=True)
            scratch.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def save_student(
    student: PreTrainedModel,
    processor: Any,
    texts: Mapping[str, str],
    folder: Path,
    write: Callable[[Path], None] | None = None,
) -> None:
    """Write weights, config, tokenizer or image processor (if any) and text files to `folder`, all or nothing.

    Args:
        texts: name of each text file -> its contents.
        write: writes weights and config to a folder; None: `student.save_pretrained`.
    """
    with atomic_folder(folder, student.get_memory_footprint()) as scratch, _bars_on_terminals_only():
        (write or student.save_pretrained)(scratch)
        if processor is not None:
            processor.save_pretrained(scratch)
        for name, text in texts.items():
            (scratch / name).write_text(text, encoding="utf-8")


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """Hide transformers' progress bars, like ours, unless stderr is a terminal; the GGUF reader has its own."""
    reader: Any = modeling_gguf_pytorch_utils
    reader_bar = reader.tqdm
    hidden = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    reader.tqdm = functools.partial(reader_bar, disable=None)
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        reader.tqdm = reader_bar
        if hidden:
            logging.enable_progress_bar()
