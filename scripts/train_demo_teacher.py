"""Train a small Llama or GPT-2 on Python sources, tokenizer included: how the demo's teacher can be made again.

The defaults are the shape and the budget of the bundled teacher, which took 75 minutes on two cores over the standard
library and some permissively licensed packages:

    python scripts/train_demo_teacher.py --output-dir teacher --packages torch transformers numpy scipy networkx

A few minutes show that it learns:

    python scripts/train_demo_teacher.py --output-dir teacher --tokens 100000 --context 256

A teacher with a longer reach goes on from one that is there: with a larger base of the rotary embedding, on longer rows
of files that lie next to each other, some of them with spans that come back far away (experiments/long_reach):

    python scripts/train_demo_teacher.py --output-dir long --continue-from src/linearize/demo/teacher --context 8192 \
        --rope-theta 500000 --join 100000 --repeats 0.25 --batch-size 1 --tokens 2000000 --muon-lr 0.005 \
        --adamw-lr 0.001 --packages torch transformers numpy scipy networkx

Whatever the sources, the modules that the bundled teacher never saw are left out, and the loss at the end is measured
on those of the standard library, so that two teachers of one tokenizer can be compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from linearize.base import UserError, progress
from linearize.configs.data import DataConfig
from linearize.data.packing import dataset_from_documents
from linearize.data.rows import PackedRows, on_device
from linearize.demo.corpus import (
    HELD_OUT_MODULES,
    module_sources,
    standard_library_folder,
    standard_library_texts,
)

sys.path.insert(0, str(Path(__file__).parent))  # the tests load this file from elsewhere
from write_stdlib_corpus import joined, package_folder

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_IN_PACKAGES = frozenset(
    {
        "matplotlib.backends._backend_tk",
        "matplotlib.backends.backend_cairo",
        "matplotlib.hatch",
        "networkx.algorithms.approximation.maxcut",
        "networkx.algorithms.centrality.current_flow_betweenness",
        "networkx.algorithms.chains",
        "networkx.algorithms.components.weakly_connected",
        "networkx.algorithms.connectivity.edge_kcomponents",
        "networkx.algorithms.dominating",
        "networkx.algorithms.link_analysis.hits_alg",
        "networkx.algorithms.moral",
        "networkx.algorithms.traversal.edgedfs",
        "networkx.algorithms.wiener",
        "networkx.classes.graphviews",
        "networkx.generators.trees",
        "networkx.readwrite.graph6",
        "nltk.classify.naivebayes",
        "nltk.corpus.reader.comparative_sents",
        "nltk.corpus.reader.timit",
        "nltk.draw.table",
        "nltk.grammar",
        "nltk.jsontags",
        "nltk.tbl.erroranalysis",
        "nltk.tokenize.sonority_sequencing",
        "nltk.tree.tree",
    }
)
"""Modules of packages that the bundled teacher never saw; `HELD_OUT_MODULES` are those of the standard library."""

console = Console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 something the user can fix, said in one line."""
    args = parser().parse_args(arguments)
    try:
        run(args)
    except UserError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.split("\n", 2)[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument(
        "--continue-from",
        type=Path,
        metavar="DIR",
        help="a Llama to go on from, with its tokenizer and shape; --context and --rope-theta are the new ones",
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--sources",
        type=Path,
        nargs="+",
        metavar="DIR",
        default=[standard_library_folder()],
        help="folders of .py files; test folders and held-out modules in them are left out (the standard library)",
    )
    data.add_argument(
        "--packages",
        nargs="+",
        metavar="NAME",
        default=[],
        help="installed packages to train on as well; see to it yourself that their licences are permissive",
    )
    data.add_argument("--vocab-size", type=positive, default=4096, help="of the byte-level BPE tokenizer (%(default)s)")
    data.add_argument("--context", type=positive, default=1024, help="tokens per row (%(default)s)")
    data.add_argument(
        "--join",
        type=positive,
        default=1,
        metavar="CHARACTERS",
        help="files next to each other make texts of at least so many characters, for what is far apart (each its own)",
    )
    data.add_argument(
        "--repeats",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the rows, in which spans of text and of random tokens come twice, far apart (%(default)s)",
    )
    shape = parser.add_argument_group("shape")
    shape.add_argument(
        "--model-type",
        choices=("llama", "gpt2"),
        default="llama",
        help="gpt2: --kv-heads, --head-dim, --intermediate-size and --rope-theta are not read (%(default)s)",
    )
    shape.add_argument("--layers", type=positive, default=6, help="number of layers (%(default)s)")
    shape.add_argument("--hidden-size", type=positive, default=256, help="width of the residual stream (%(default)s)")
    shape.add_argument("--heads", type=positive, default=4, help="query heads (%(default)s)")
    shape.add_argument("--kv-heads", type=positive, default=2, help="key and value heads (%(default)s)")
    shape.add_argument("--head-dim", type=positive, default=64, help="width of one head (%(default)s)")
    shape.add_argument(
        "--intermediate-size", type=positive, default=704, help="width of the SwiGLU layer (%(default)s)"
    )
    shape.add_argument("--rope-theta", type=float, default=1e4, help="base of the rotary embedding (%(default)s)")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--tokens", type=positive, default=18_000_000, help="to train on, repeats included (%(default)s)"
    )
    training.add_argument("--batch-size", type=positive, default=4, help="rows per step (%(default)s)")
    training.add_argument("--muon-lr", type=float, default=0.02, help="learning rate of the matrices (%(default)s)")
    training.add_argument(
        "--adamw-lr", type=float, default=3e-3, help="learning rate of the embeddings and norms (%(default)s)"
    )
    training.add_argument(
        "--held-out-rows", type=positive, default=80, help="rows of the loss at the end (%(default)s)"
    )
    training.add_argument(
        "--seed", type=int, default=0, help="of the initial weights and the order of the rows (%(default)s)"
    )
    training.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="a torch device (%(default)s)"
    )
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> None:
    """Sources -> tokenizer -> packed rows -> model -> an ordinary Hugging Face folder, and its held-out loss."""
    if args.output_dir.exists():
        raise UserError(f"--output-dir: expected a folder that does not exist yet, found {args.output_dir}")
    if args.heads % args.kv_heads:
        raise UserError(f"--kv-heads: expected a divisor of --heads ({args.heads}), found {args.kv_heads}")
    if not 0 <= args.repeats <= 1:
        raise UserError(f"--repeats: expected a share between 0 and 1, found {args.repeats}")
    continued = None if args.continue_from is None else teacher_to_continue(args)
    texts = training_texts([*args.sources, *map(package_folder, args.packages)])
    _, held_out = standard_library_texts()
    console.print(f"{len(texts)} files to train on, {sum(map(len, texts)) / 1e6:.1f} MB; {len(held_out)} held out")
    if continued is None:
        tokenizer = train_tokenizer(texts, args.vocab_size, args.context)
        model = build_model(args, len(tokenizer))
    else:
        tokenizer, model = continued
    model.to(args.device)
    data = DataConfig(
        sequence_length=args.context, validation_rows=args.held_out_rows, repeated_span_fraction=args.repeats
    )
    dataset = dataset_from_documents(joined(texts, args.join), held_out, tokenizer, data, args.seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{size / 1e6:.2f}M parameters; one epoch is {dataset.train.num_tokens / 1e6:.2f}M tokens")
    train(model, dataset.train, args)
    with atomic_folder(args.output_dir) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # What was written is what is measured.
        stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(args.device)
        loss = held_out_loss(stored, dataset.test)
    console.print(f"{args.output_dir}: held-out loss {loss:.3f} nats per token ({dataset.test.num_tokens} tokens)")


def training_texts(folders: Sequence[Path]) -> list[str]:
    """The sources in the folders, without the modules that are held out.

    Raises:
        UserError: not a folder, or no sources in any.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--sources: expected a folder, found {str(folder)!r}; check the path")
    held_out = HELD_OUT_MODULES | HELD_OUT_IN_PACKAGES
    texts = [text for folder in folders for module, text in module_sources(folder) if module not in held_out]
    if not texts:
        raise UserError(f"--sources: expected .py files to train on, found none in {', '.join(map(str, folders))}")
    return texts


def train_tokenizer(texts: Sequence[str], vocab_size: int, context: int) -> PreTrainedTokenizerBase:
    """Byte-level BPE; `END_OF_TEXT`, id 0, begins, ends and pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=console.is_terminal,
    )
    with console.status("training the tokenizer"):
        tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=context,
    )


def teacher_to_continue(args: argparse.Namespace) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """A model with `--context` and `--rope-theta`, and its tokenizer.

    Raises:
        UserError: the folder holds no Llama.
    """
    if not (args.continue_from / "config.json").is_file():
        raise UserError(f"--continue-from: expected a model's folder, found {str(args.continue_from)!r}")
    config = AutoConfig.from_pretrained(args.continue_from)
    if config.model_type != "llama":
        raise UserError(f"--continue-from: expected a model of type 'llama', found {config.model_type!r}")
    config.max_position_embeddings = args.context
    config.rope_parameters = {"rope_type": "default", "rope_theta": args.rope_theta}
    tokenizer = AutoTokenizer.from_pretrained(args.continue_from, model_max_length=args.context)
    return tokenizer, AutoModelForCausalLM.from_pretrained(args.continue_from, config=config, dtype=torch.float32)


def build_model(args: argparse.Namespace, vocab_size: int) -> PreTrainedModel:
    """New weights: of a Llama, or of a GPT-2, which has as many KV heads as query heads and learned positions."""
    torch.manual_seed(args.seed)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": True}
    if args.model_type == "gpt2":
        config = GPT2Config(
            vocab_size=vocab_size,
            n_embd=args.hidden_size,
            n_inner=4 * args.hidden_size,
            n_layer=args.layers,
            n_head=args.heads,
            n_positions=args.context,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            **ends,
        )
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.context,
        rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta},
        **ends,
    )
    return LlamaForCausalLM(config)


def train(model: PreTrainedModel, rows: PackedRows, args: argparse.Namespace) -> None:
    """Muon on the matrices, AdamW on the rest; the learning rates fall linearly to 0 over the second half."""
    steps = max(1, args.tokens // (args.batch_size * args.context))
    optimizers = build_optimizers(model, args.muon_lr, args.adamw_lr)
    schedules = [LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps))) for optimizer in optimizers]
    batches = shuffled_batches(rows, args.batch_size, args.seed)
    columns = (TextColumn("training"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn())
    model.train()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"))
        for step in range(1, steps + 1):
            batch = next(batches)
            inputs, labels = on_device(batch.inputs(), torch.device(args.device)), batch.labels.to(args.device)
            with torch.autocast(torch.device(args.device).type, torch.bfloat16):
                loss = model(**inputs, labels=labels).loss
            loss.backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            progress.update(task, advance=1, loss=loss.item())
            if step == 1 or step % max(1, steps // 20) == 0:  # also for logs, where there is no bar
                console.print(f"step {step}/{steps}: loss {loss.item():.3f}")


def build_optimizers(model: PreTrainedModel, muon_lr: float, adamw_lr: float) -> list[Optimizer]:
    embeddings = {id(x) for part in model.modules() if isinstance(part, nn.Embedding) for x in part.parameters()}
    matrices = [x for x in model.parameters() if x.ndim == 2 and id(x) not in embeddings]
    in_muon = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in in_muon]
    return [
        Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.0),
        AdamW(others, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def shuffled_batches(rows: PackedRows, batch_size: int, seed: int) -> Iterator[PackedRows]:
    """Batches without end, each epoch in an order of its own; the rows that do not fill a batch wait for the next."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        while len(order) < batch_size:
            order += torch.randperm(len(rows), generator=generator).tolist()
        yield rows.rows(order[:batch_size])
        del order[:batch_size]


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, rows: PackedRows) -> float:
    """Mean loss in nats per predicted token."""
    model.eval()
    total, count = 0.0, 0
    for index in progress(range(len(rows)), "held-out loss"):
        row = rows.rows([index])
        predicted = int(row.target_counts().sum())
        loss = model(**on_device(row.inputs(), model.device), labels=row.labels.to(model.device)).loss
        total += loss.item() * predicted
        count += predicted
    return total / count


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder that is moved to `path` once the block is left without an error, and deleted otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
        folder = Path(scratch, path.name)
        folder.mkdir()
        yield folder
        folder.replace(path)


if __name__ == "__main__":
    sys.exit(main())
