"""The table cuts a one-device model so that the slices, put together, are that model to the last bit."""

from pathlib import Path

import pytest
import torch

from shared.mesh import Mesh
from tests.support.runs import run_config
from trainer.models import build
from trainer.parallel import expert
from trainer.parallel.groups import TensorGroup, lines
from trainer.parallel.tensor import cut_dim, is_cut, split

EXPERTS = {"experts": 4, "expert_mlp": 24, "expert_every": 2}


def model_of(folder: Path, **decoder: int | bool) -> build.Stack:
    """The small model, whole."""
    return build.build(run_config(folder, "x.tar", model={"decoder": decoder}), "sdpa")


def share(folder: Path, rank: int, size: int, **decoder: int | bool) -> build.Stack:
    """Rank `rank`'s share of it; cutting alone communicates nothing."""
    model = model_of(folder, **decoder)
    split(model, TensorGroup(None, rank, size))
    return model


@pytest.mark.parametrize("decoder", [{"qkv_bias": True}, EXPERTS], ids=["biases", "experts"])
def test_slices_together_are_the_whole_weights(tmp_path: Path, decoder: dict[str, int | bool]) -> None:
    whole = model_of(tmp_path, **decoder)
    shares = [dict(share(tmp_path, rank, 2, **decoder).named_parameters()) for rank in range(2)]
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


def test_experts_are_cut_inside_and_shared_out_besides(tmp_path: Path) -> None:
    whole = dict(model_of(tmp_path, **EXPERTS).named_parameters())
    shares = {}
    for tensor in range(2):
        for place in range(2):
            model = share(tmp_path, tensor, 2, **EXPERTS)
            expert.split_experts(model, expert.ExpertGroup(None, None, place, 2))
            shares[tensor, place] = dict(model.named_parameters())
    for name in ("gate", "up", "down"):
        path = f"2.experts.{name}"
        rows = [torch.cat([shares[tensor, place][path] for tensor in range(2)], cut_dim(path)) for place in range(2)]
        assert torch.equal(torch.cat(rows), whole[path]), name
        assert all(is_cut(each[path]) and expert.is_expert(each[path]) for each in shares.values()), name
    assert not is_cut(shares[0, 0]["2.router.weight"])


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
