"""One entry into ``saved_tensors()`` and the backward that follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from torch.autograd.graph import saved_tensors_hooks

from lightning_ssd.activations.kept_storage import KeptStorage
from lightning_ssd.activations.saved_storage import SavedStorage
from lightning_ssd.common.compiler import hide_from_compiler
from lightning_ssd.errors import HooksRefusedError, OffloadError
from lightning_ssd.recompute.blocks import Blocks
from lightning_ssd.scheduling.clock import Stamp
from lightning_ssd.scheduling.pass_profile import PassProfile, ProfileBook, storages_to_keep
from lightning_ssd.scheduling.plan_cursor import PlanCursor
from lightning_ssd.scheduling.recorder import Recorder

if TYPE_CHECKING:
    from lightning_ssd.activations.tensor_cache import TensorCache

__all__ = ["PassBegin", "SavedPass"]

_MAX_STALLS = 4096
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class PassBegin:
    """The clock, the memory and the counters when a pass began."""

    stamp: Stamp
    level_bytes: int
    """Bytes of all memory in use but saved tensors; 0 without a scheduler."""
    written_bytes: int
    read_bytes: int
    host_bytes: int
    num_packed: int
    """Tensors that autograd had handed to us by then."""
    hook_s: float
    worker_s: float
    num_faults: int
    highest_bytes: int = 0
    """The most memory that had been in use by then; 0 where no limit asks for it."""


def _explain_refusal(error: RuntimeError) -> None:
    """Raise our error for PyTorch's, where a transform refuses hooks (``doesnt_support_saved_tensors_hooks``)."""
    text = str(error)
    if "torch.func." in text and "support saved tensor hooks" in text:
        raise HooksRefusedError(
            "torch.func.grad, vjp, jacrev and hessian refuse saved-tensor hooks, by which lightning_ssd offloads what "
            "this forward saves. Write torch.autograd.grad(f(x), x, create_graph=True), or "
            "torch.autograd.functional.vjp, jacobian or hessian, in their place. In a loop of your own you may also "
            "call them outside of `with offloader.saved_tensors():`"
        ) from error


class SavedPass:
    """Holds what was saved in one forward, in order, and what backward has asked for so far.

    A context manager that installs the hooks. The accounting lock guards everything else.

    Args:
        cache: keeps what is saved; told as the forward begins and ends.
        blocks: that forward may go through.
        signature: passes with equal ones are of one kind, and learn from each other.
        recompute_all: recompute every block, whatever the plan says.
    """

    def __init__(
        self,
        cache: TensorCache,
        *,
        blocks: Sequence[Blocks] = (),
        signature: Hashable = None,
        recompute_all: bool = False,
    ) -> None:
        self._blocks = blocks
        self.recomputes_all = recompute_all
        self.signature = signature
        self.cursor: PlanCursor | None = None  # none: the cache moves whatever is large enough
        self.limit_bytes: int | None = None  # without a plan: forward waits for writes above it
        self.recorder: Recorder | None = None  # none: no plan is made from this pass
        self.begin: PassBegin | None = None
        self.stalls: deque[tuple[Stamp, Stamp]] = deque(maxlen=_MAX_STALLS)  # some graphs live on without a backward
        self.is_finished = False
        self.has_failed = False  # its forward was left by an exception: what it saved is not all
        self.is_plain = False  # it keeps everything and is not recorded: no hooks at all
        self.records: list[SavedStorage | KeptStorage] = []
        self.num_freed = 0  # of these
        self.sizes: list[int] = []
        self.packed_s: list[float] = []
        self.follows = True  # what is known of it: it was entered once, by one thread
        self.order: list[int] = []
        self.wanted_s: dict[int, float] = {}  # when each was first asked for
        self.stayed: set[int] = set()  # whose memory the program was found to hold
        self.next_ahead = 0
        self.recomputed_bytes = 0  # saved again by its blocks so far
        self._cache = cache
        self._kept: object = None  # while the forward runs
        self._num_blocks = 0
        self._installed: list[AbstractContextManager[object]] = []
        self._guess: PassProfile | None = None
        self._is_new = False
        self._expected: tuple[int, ...] = ()
        self._position: dict[int, int] = {}

    def __enter__(self) -> None:
        hide_from_compiler()
        self._cache.enter(self)
        if self.is_plain:
            self._installed.append(_NOTHING)
            return
        # Made here, and let go at the exit: they refer to us, and would keep us and themselves alive in a cycle. The
        # graph has its own reference to what it still needs.
        with ExitStack() as stack:
            for blocks in self._blocks:
                stack.enter_context(blocks.observe(self))
            pack, unpack = self._cache.hooks.of(self)
            if self.recorder is not None:
                pack, unpack = self.recorder.timed(pack), self.recorder.timed(unpack)
            stack.enter_context(saved_tensors_hooks(pack, unpack))
            self._installed.append(stack.pop_all())

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._installed.pop().__exit__(exc_type, exc, traceback)
        self.has_failed = self.has_failed or exc_type is not None
        if not self._installed:
            if not self.is_plain:
                self._cache.leave(self)
            self._kept = None
            if self.recorder is not None:
                self.recorder.forward_ended()
        if isinstance(exc, RuntimeError) and not isinstance(exc, OffloadError) and not self.is_plain:
            _explain_refusal(exc)

    def keep_until_over(self, owner: object) -> None:
        """Hold an object until the forward is over, so that it does not die meanwhile."""
        self._kept = owner

    @property
    def is_complete(self) -> bool:
        """Whether its forward is over and its backward has begun, so that it can be learnt from."""
        return self.is_over and bool(self.order) and not self.is_spoilt

    @property
    def is_spoilt(self) -> bool:
        """Whether an interrupt came while a storage was added, so that nothing can be learnt from this pass."""
        return not len(self.records) == len(self.sizes) == len(self.packed_s)

    @property
    def is_freed(self) -> bool:
        """Whether its graph has let go of all that it has saved so far."""
        return self.num_freed >= len(self.records)

    @property
    def is_over(self) -> bool:
        """Whether its forward is over."""
        return not self._installed

    def freed(self, record: SavedStorage) -> None:
        """The graph has let go of a storage."""
        if self.recorder is not None and not self.is_spoilt:
            self.recorder.freed(record.index)

    # -- blocks, as forward goes through them --------------------------------------------------------------------

    @property
    def wants_inputs(self) -> bool:
        """Whether the bytes of the blocks' inputs are worth counting."""
        return self.recorder is not None

    @property
    def refused_blocks(self) -> frozenset[str]:
        """Blocks that cannot be recomputed exactly; to be asked right after backward, in a recorded pass."""
        return frozenset(name for blocks in self._blocks for name in blocks.refused)

    def block_enters(self, name: str) -> bool:
        """Whether this call of a block is to be recomputed in backward."""
        recompute = self.recomputes_all or (self.cursor is not None and self._num_blocks in self.cursor.recompute)
        self._num_blocks += 1
        if self.recorder is not None:
            self.recorder.block_enters(name, recompute=recompute)
        return recompute

    def block_inputs(self, nbytes: int) -> None:
        """The entered block was given tensors of so many bytes."""
        if self.recorder is not None:
            self.recorder.block_inputs(nbytes)

    def block_is_kept(self) -> None:
        """The entered block cannot be recomputed."""
        if self.recorder is not None:
            self.recorder.block_is_kept()

    def block_leaves(self) -> None:
        """Forward leaves the block."""
        if self.recorder is not None:
            self.recorder.block_leaves()

    def block_recomputed(self, sizes: Iterable[int]) -> None:
        """Backward has run a block again."""
        self._cache.recomputed(self, sizes)

    def block_tried(self, begin_s: float, end_s: float) -> None:
        """Backward has run a block again on trial."""
        if self.recorder is not None:
            self.recorder.set_aside(begin_s, end_s)

    # -- storages ------------------------------------------------------------------------------------------------

    def expects_keep(self, book: ProfileBook, nbytes: int) -> bool:
        """Whether an earlier pass that began like this one says that the next storage had better stay."""
        index = len(self.sizes)
        known = self._guess.sizes if self._guess is not None else ()
        if not self._is_new and (index >= len(known) or known[index] != nbytes):
            self._guess = book.guess([*self.sizes, nbytes])
            self._is_new = self._guess is None
        return self._guess is not None and index in self._guess.keep

    def expected_order(self, book: ProfileBook) -> tuple[int, ...]:
        """Indices in the order in which backward will want them: as recorded, else the reverse of forward."""
        if len(self._expected) == 0 and self.records:
            profile = book.exact(self.sizes)
            self._expected = profile.order if profile else tuple(reversed(range(len(self.records))))
            self._position = {index: position for position, index in enumerate(self._expected)}
        return self._expected

    def asked_for(self, record: SavedStorage | KeptStorage, now_s: float, book: ProfileBook) -> None:
        """Backward unpacks this storage; what lies before it in the expected order is not prefetched any more."""
        if record.index not in self.wanted_s:
            self.wanted_s[record.index] = now_s
            if record.accounting.recorder is not None:
                record.accounting.recorder.backward_wants()
            self.order.append(record.index)
            if self.recorder is not None and not self.is_spoilt:
                self.recorder.wanted(record.index, record.accounting.counters.resident_bytes)
        self.expected_order(book)
        self.next_ahead = max(self.next_ahead, self._position.get(record.index, -1) + 1)

    def step_back(self, record: SavedStorage) -> None:
        """Look ahead from a storage again, since it was brought up and had to go."""
        self.next_ahead = min(self.next_ahead, self._position.get(record.index, self.next_ahead))

    def profile(self, *, write_rate: float, read_rate: float) -> PassProfile | None:
        """Return what the next pass of this shape can learn from this one; ``None``: a thread is just adding to it."""
        sizes, packed_s, order = tuple(self.sizes), tuple(self.packed_s), tuple(self.order)
        if len(sizes) != len(packed_s):
            return None
        if self.cursor is not None:  # no pass asks what to keep of it: plans tell
            return PassProfile(sizes, order, frozenset([record.index for record in self.records if record.stays]))
        wanted_s = [self.wanted_s.get(index) for index in range(len(sizes))]
        keep = storages_to_keep(
            sizes, packed_s, wanted_s, stayed=self.stayed, write_rate=write_rate, read_rate=read_rate
        )
        return PassProfile(sizes, order, keep)
