"""`LoaderDataset`: the client as a `torch.utils.data.IterableDataset` with a state, for frameworks that own the loop.

Frameworks ask for batches before they use them, so an item is a copy, and its slot goes back to the daemon at once.
The state is a place: behind the last item handed out. Save it when everything handed out has been trained on, as it is
at the end of a step. The length is known, so that no framework needs to read ahead to find the end.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shared.batch import Cursor
from shared.errors import ConfigError
from trainer.batches import Batch, views
from trainer.client import LoaderClient

Item = dict[str, torch.Tensor]


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `state_dict` holds: the cursor of the next micro-batch, how many global steps are done, and the client's
    `content`, which tells the shards that the cursor is a place in."""

    epoch: int = 0
    step: int = 0
    micro: int = 0
    steps_done: int = 0
    content: str = ""

    def behind(self, batch: Batch, content: str) -> "State":
        """The state once `batch` is done."""
        after = batch.after
        return State(after.epoch, after.step, after.micro, self.steps_done + batch.ends_step, content)


class LoaderDataset(IterableDataset[Item]):
    """One data-parallel rank's micro-batches of `steps` global steps; each pass goes on where the last one ended.

    An item holds the fields of a batch (`tokens_T`, `pixels_NHWC` and so on, as `shared.batch.batch_spec` lays them
    out), `step_labels` (int64 scalar: label tokens of the whole global batch) and `ends_step` (bool scalar). Wrap it in
    `DataLoader(dataset, batch_size=None)`, without worker processes: the daemon has them.

    Args:
        endpoint: the daemon's address.
        steps: global steps of the whole run, with those that a loaded state has behind it.
        data_ranks: data-parallel ranks.
        options: all else that `LoaderClient` takes, but `cursor` and `content`.
    """

    def __init__(self, endpoint: str, steps: int, *, data_ranks: int = 1, **options: Any) -> None:
        self._endpoint, self._steps, self._data_ranks, self._options = endpoint, steps, data_ranks, options
        self._state = State()
        self._micro_batches = 0

    def __iter__(self) -> Iterator[Item]:
        """The items from the state on.

        Raises:
            ConfigError: it is iterated in a worker process of a DataLoader. And all that `LoaderClient` raises.
        """
        if worker := get_worker_info():
            rule = "must be 0, since each worker process would read the whole stream"
            raise ConfigError("num_workers", worker.num_workers, rule, "raise loader.workers in the run file instead")
        with self._client() as client:
            self._micro_batches = client.connect().micro_batches
            for batch in client:
                item = _copied(batch)
                batch.release()
                self._state = self._state.behind(batch, client.content)
                yield item

    def __len__(self) -> int:
        """Micro-batches of this rank in all `steps`; the daemon is asked how many a step has."""
        if not self._micro_batches:
            with self._client() as client:
                self._micro_batches = client.connect().micro_batches
        return self._steps * self._micro_batches // self._data_ranks

    def state_dict(self) -> dict[str, int | str]:
        """The place behind the last item handed out, as plain numbers and a word."""
        return msgspec.structs.asdict(self._state)

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Begin the next pass at this place.

        Raises:
            ConfigError: it is no such place.
        """
        try:
            self._state = msgspec.convert(state, State)
        except msgspec.ValidationError as error:
            raise ConfigError("state", state, f"cannot be used: {error}", "pass what state_dict returned") from None

    def _client(self) -> LoaderClient:
        state = self._state
        cursor, left = Cursor(state.epoch, state.step, state.micro), self._steps - state.steps_done
        options: dict[str, Any] = {"cursor": cursor, "content": state.content, "steps": left, **self._options}
        return LoaderClient(self._endpoint, data_ranks=self._data_ranks, **options)


def _copied(batch: Batch) -> Item:
    """The batch outside its slot: one copy of the payload, and views over that."""
    told = {"step_labels": torch.tensor(batch.step_labels), "ends_step": torch.tensor(batch.ends_step)}
    return {**views(batch.payload.clone(), batch.spec), **told}
