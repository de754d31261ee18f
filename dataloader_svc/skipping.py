"""Where an order goes on when steps are passed over on request: step numbers over all epochs as cursors, and hops.

A hop never changes what a cursor stands for, nor which cursor a batch is followed by: a reader asks for the cursor
after its last batch, and gets the first one from there on that is not passed over, together with where the hop began.
"""

from collections.abc import Callable

from shared.batch import Cursor
from shared.errors import ConfigError
from shared.skips import Ranges, merged

MOST_EPOCHS = 1000


class Skips:
    """`ranges` are steps [first, end) over all epochs; `steps(epoch)` tells how many an epoch has.

    Epochs before a range are counted once, when first asked: a plan is built for each whose count was not kept.
    """

    def __init__(self, ranges: Ranges, steps: Callable[[int], int]) -> None:
        self._ranges, self._steps = merged(ranges), steps
        self._spans: list[tuple[Cursor, Cursor]] | None = None

    def spans(self) -> list[tuple[Cursor, Cursor]]:
        """The ranges as cursors [first, end), ascending.

        Raises:
            ConfigError: one lies beyond the first MOST_EPOCHS epochs.
        """
        if self._spans is None:
            edges = [edge for span in self._ranges for edge in span]
            places = self._locate(edges)
            self._spans = list(zip(places[::2], places[1::2], strict=True))
        return self._spans

    def landing(self, cursor: Cursor) -> Cursor:
        """The first cursor from `cursor` on that is not passed over."""
        return next((end for first, end in self.spans() if first <= cursor < end), cursor)

    def before(self, cursor: Cursor) -> Cursor | None:
        """Where the stretch begins that is passed over just before `cursor`; None where none is."""
        return next((first for first, end in self.spans() if end == cursor), None)

    def _locate(self, numbers: list[int]) -> list[Cursor]:
        """Cursors of ascending step numbers.

        Raises:
            ConfigError: one lies too far away to be meant.
        """
        found, epoch, first = [], 0, 0
        for number in numbers:
            while number >= first + self._steps(epoch):
                first += self._steps(epoch)
                epoch += 1
                if epoch == MOST_EPOCHS:
                    rule = f"lies beyond the first {MOST_EPOCHS} epochs, which have {first} steps"
                    raise ConfigError(
                        "data.skip_steps", number, rule, "number global batches as the trainer's log does"
                    )
            found.append(Cursor(epoch, number - first))
        return found
