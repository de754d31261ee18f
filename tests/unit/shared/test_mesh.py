"""Rank arithmetic in DeepSpeed's axis order."""

import doctest

import pytest

import shared.mesh
from shared.errors import ConfigError
from shared.mesh import Mesh, mesh_of
from shared.sections import MeshSection


def test_the_examples_in_the_docstring_run() -> None:
    assert doctest.testmod(shared.mesh).failed == 0


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=2, data=3, tensor=4), Mesh(data=8)])
def test_rank_and_coords_are_inverse(mesh: Mesh) -> None:
    assert [mesh.rank(mesh.coords(r)) for r in range(mesh.world)] == list(range(mesh.world))


def test_only_first_and_last_stage_read() -> None:
    mesh = Mesh(pipe=3, data=2, tensor=2)
    assert {mesh.coords(r).pipe for d in (0, 1) for r in mesh.readers(d)} == {0, 2}
    assert len(mesh.readers(0)) == 4 and set(mesh.readers(0)).isdisjoint(mesh.readers(1))


def test_one_stage_has_one_reader_per_tensor_rank() -> None:
    assert Mesh(data=2).readers(1) == (1,)


def test_degrees_that_do_not_make_up_the_world_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipe 2 x data 2 x tensor 1 = 4\) must equal the number of processes, 3"):
        mesh_of(MeshSection(pipe=2, data=2), 3)
