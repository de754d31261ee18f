"""Which rank sits where. Pure arithmetic, in DeepSpeed's axis order: rank = (pipe * data + d) * tensor + t.

>>> mesh = Mesh(pipe=2, data=2, tensor=1)
>>> mesh.coords(3)
Coords(pipe=1, data=1, tensor=0)
>>> mesh.readers(1)
(1, 3)
"""

import msgspec

from shared.errors import ConfigError
from shared.sections import MeshSection


class Coords(msgspec.Struct, frozen=True):
    """Place of one rank on every axis."""

    pipe: int
    data: int
    tensor: int


class Mesh(msgspec.Struct, frozen=True, kw_only=True):
    """Degrees of parallelism. `expert` divides `data`: an expert group is a run of so many neighbouring data ranks."""

    pipe: int = 1
    data: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        return self.pipe * self.data * self.tensor

    def coords(self, rank: int) -> Coords:
        """Coordinates of `rank`."""
        outer, tensor = divmod(rank, self.tensor)
        pipe, data = divmod(outer, self.data)
        return Coords(pipe, data, tensor)

    def rank(self, coords: Coords) -> int:
        """Rank at `coords`."""
        return (coords.pipe * self.data + coords.data) * self.tensor + coords.tensor

    def readers(self, data: int) -> tuple[int, ...]:
        """Ranks that read the batches of data coordinate `data`: first and last stage, all tensor ranks."""
        stages = sorted({0, self.pipe - 1})
        return tuple(self.rank(Coords(p, data, t)) for p in stages for t in range(self.tensor))


def mesh_of(section: MeshSection, world: int) -> Mesh:
    """The mesh of a run of `world` processes.

    Raises:
        ConfigError: the degrees do not multiply to `world`.
    """
    mesh = Mesh(pipe=section.pipe, data=section.data, tensor=section.tensor, expert=section.expert)
    if mesh.world != world:
        value = f"pipe {mesh.pipe} x data {mesh.data} x tensor {mesh.tensor} = {mesh.world}"
        remedy = f"launch {mesh.world} processes or set mesh.data to make up {world}"
        raise ConfigError("mesh", value, f"must equal the number of processes, {world}", remedy)
    return mesh
