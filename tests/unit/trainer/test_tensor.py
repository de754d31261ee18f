"""The table cuts a one-device model so that the slices, put together, are that model to the last bit."""

from pathlib import Path

import pytest
import torch

from shared.mesh import Mesh
from tests.support.runs import run_config
from trainer.models import build
from trainer.parallel.groups import TensorGroup, lines
from trainer.parallel.tensor import cut_dim, is_cut, split


def share(folder: Path, rank: int, size: int) -> build.Stack:
    """Rank `rank`'s share of the small model; cutting alone communicates nothing."""
    model = build.build(run_config(folder, "x.tar", model={"decoder": {"qkv_bias": True}}), "sdpa")
    split(model, TensorGroup(None, rank, size))
    return model


def test_slices_together_are_the_whole_weights(tmp_path: Path) -> None:
    whole = build.build(run_config(tmp_path, "x.tar", model={"decoder": {"qkv_bias": True}}), "sdpa")
    shares = [dict(share(tmp_path, rank, 2).named_parameters()) for rank in range(2)]
    assert list(shares[0]) == [name for name, _ in whole.named_parameters()]
    for name, parameter in whole.named_parameters():
        dim = cut_dim(name)
        pieces = [each[name] for each in shares]
        together = pieces[0] if dim is None else torch.cat(pieces, dim)
        assert torch.equal(together, parameter), name
        assert all(is_cut(piece) == (dim is not None) for piece in pieces), name
        assert all(piece.is_contiguous() for piece in pieces), name


def test_the_decoder_is_cut_and_the_encoders_are_not(tmp_path: Path) -> None:
    names = [name for name, _ in share(tmp_path, 0, 2).named_parameters()]
    whole = [name for name in names if cut_dim(name) is None]
    assert all("norm" in name or name.startswith(("0.vision", "0.audio")) for name in whole)
    assert not any(cut_dim(name) is not None for name in names if name.startswith(("0.vision", "0.audio")))


def test_each_rank_runs_its_share_of_the_heads(tmp_path: Path) -> None:
    block = share(tmp_path, 1, 2).get_submodule("1")
    assert (block.heads, block.kv_heads) == (2, 1)


def test_a_size_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which 3 tensor-parallel ranks cannot share"):
        share(tmp_path, 0, 3)


def test_groups_are_the_lines_of_the_mesh() -> None:
    mesh = Mesh(pipe=2, data=2, tensor=2)
    assert lines(mesh, "tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert lines(mesh, "data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
