"""The account of one iteration: each owned range stepped exactly once, or an error names it."""

from collections.abc import Iterable, Sequence

from functional_optim._torch import foreach_add_
from functional_optim.core.brief import some
from sharding.zero.store import Piece, Request


class Account:
    """What of a rank's pieces was stepped."""

    def __init__(self) -> None:
        self.open = False
        """Whether an iteration is running."""
        self._skipped: set[str] = set()

    def begin(self, pieces: Iterable[Piece]) -> None:
        """Begin an iteration.

        Raises:
            RuntimeError: the last one did not end.
        """
        missing = self._missing(pieces) if self.open else []
        was_open = self.open
        self._clear(pieces)
        self.open = not was_open
        if was_open:
            raise RuntimeError(
                "the last iteration ended before everything was stepped; never stepped: "
                f"{some(missing)}. A backward pass failed or was cut short: go on from a "
                "checkpoint, since ranks may differ now"
            )

    def end(self, pieces: Iterable[Piece]) -> None:
        """End it.

        Raises:
            RuntimeError: it was not begun, or a trainable range was not stepped and not declared
                unused.
        """
        if not self.open:
            raise RuntimeError("there is no iteration to end; call begin_iteration() first")
        missing = self._missing(pieces)
        self._clear(pieces)
        self.open = False
        if missing:
            raise RuntimeError(
                f"owned by this rank and never stepped in this iteration: {some(missing)}; "
                "declare parameters that no gradient came for with skip(paths)"
            )

    def skip(self, paths: Iterable[str]) -> None:
        """No gradient comes for these in this iteration."""
        self._skipped.update(paths)

    def check(self, requests: Sequence[Request]) -> None:
        """None of these ranges was stepped before in this iteration.

        Raises:
            RuntimeError: names the parameter.
        """
        seen: dict[int, list[tuple[int, int]]] = {}
        for piece, start, stop, _ in requests:
            before = seen.setdefault(id(piece), list(piece.done))
            if piece.path in self._skipped:
                raise RuntimeError(
                    f"the parameter {piece.path!r} was declared unused in this iteration, and is "
                    "to be stepped now"
                )
            twice = any(a < stop and start < b for a, b in before)
            if twice or (before and start == stop):
                raise RuntimeError(
                    f"elements [{start}, {stop}) of the parameter {piece.path!r} were stepped "
                    "already in this iteration, and are to be stepped again"
                )
            before.append((start, stop))

    def enter(self, requests: Sequence[Request]) -> None:
        """These ranges were stepped; a piece that was stepped to its end has made a step."""
        ended = []
        for piece, start, stop, _ in requests:
            piece.done.append((start, stop))
            if _is_done(piece):
                ended.append(piece)
        if ended:
            foreach_add_([piece.step for piece in ended], 1)
        if not self.open:
            for piece in ended:
                piece.done.clear()

    def _missing(self, pieces: Iterable[Piece]) -> list[str]:
        return [
            piece.path
            for piece in pieces
            if piece.trainable and piece.path not in self._skipped and not _is_done(piece)
        ]

    def _clear(self, pieces: Iterable[Piece]) -> None:
        self._skipped.clear()
        for piece in pieces:
            piece.done.clear()


def _is_done(piece: Piece) -> bool:
    return bool(piece.done) and sum(stop - start for start, stop in piece.done) == piece.numel
