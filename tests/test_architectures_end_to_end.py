"""Every decoder from the teacher's folder to the report on a tiny model; see `test_recipes_end_to_end` for recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from linearize.hf.checkpoint import load_model, load_tokenizer
from linearize.run.folder import Run
from linearize.run.pipeline import run
from tests import tiny
from tests.byte_tokenizer import byte_tokenizer
from tests.hf.decoders import ARCHITECTURES
from tests.hf.models import ARCHITECTURES as FIRST
from tests.hf.models import make_teacher
from tests.test_recipes_end_to_end import check_stages, small


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIRST, *ARCHITECTURES])
def test_from_start_to_end(name: str, tmp_path: Path) -> None:
    """LoLCATs, by whose adapters all projections are trained, fused ones too: both stages learn, and the model runs."""
    folder, tokenizer = tmp_path / "teacher", byte_tokenizer()
    make_teacher(name, vocab_size=len(tokenizer), initializer_range=0.2).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made = Run(small("lolcats"), str(folder), tmp_path / "run", torch.float32, torch.device("cpu"))
    with tiny.quick_measures(new_tokens=1):
        card = run(made)
    check_stages(made)
    assert card is not None
    assert {"teacher", "transferred", "student"} <= {line.name for line in card.measured}

    student = load_model(str(made.folder / "model"), dtype=torch.float32, device=torch.device("cpu"))
    prompt = load_tokenizer(str(made.folder / "model"))("Once upon a time", return_tensors="pt")
    answers = [
        student.generate(**prompt, max_new_tokens=5, do_sample=False, use_cache=cache) for cache in (True, False)
    ]
    assert torch.equal(*answers)
    assert answers[0].shape[1] == prompt.input_ids.shape[1] + 5
