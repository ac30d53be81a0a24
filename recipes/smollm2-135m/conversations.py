"""Conversations of a model with itself: it writes the user's messages, and answers them.

A chat model that is given its template up to the user's message completes the message, too (Magpie,
arXiv 2406.08464). All conversations are one state machine on the GPU, without a branch on the host:

    read      the token at `_at` of every conversation, which gives logits
    choose    the next token, unless one is written there already: an opening, or the template
    turn      after a message's end, write the template up to the next message, and change sides

So there is no prefill. At 1,500 sequences a step costs about the same whether tokens are given or
chosen, and an opening is a tenth of a conversation: less than a second path through the network is
worth. A conversation that is over waits until `harvest` takes it and begins the next.
"""

import math
from collections.abc import Callable

import torch
from decode import Decoder, Weights
from openings import Script
from torch import Tensor

TEMPLATE, USER, ANSWER, LOOP = range(4)
"""Kinds of tokens. `LOOP` is an answer that repeats itself: nothing is learnt from it."""

LONGEST_ANSWER, LONGEST_PROMPT = 384, 300
"""Tokens of a message. A conversation ends where one is longer; that answer is learnt from."""
USER_TEMPERATURE, LEAST = 1.0, 0.03
"""Users' tokens are drawn at this temperature, from those with this share of the best one's
probability (min-p): a message is as good as its worst token."""
SAMPLED, ANSWER_TEMPERATURE = 0.2, 0.8
"""Share of conversations whose answers are sampled, and at what temperature; others are greedy."""
SECOND_TURN, THIRD_TURN = 0.35, 0.1
"""Shares of conversations that have one."""

TAIL, PERIOD = 24, 96
"""An answer is a loop if its last 24 tokens are those of at most 96 tokens before. Shorter runs
recur in tables, code and lists that go on well."""

STEPS = 32
"""Steps between harvests."""


class Corpus:
    """Conversations one after the other, on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate `size` tokens."""
        self._tokens = torch.zeros(size, dtype=torch.int32, device=device)
        self._kinds = torch.zeros(size, dtype=torch.uint8, device=device)
        self.lengths: list[int] = []
        """Tokens of each conversation."""
        self._count = 0

    @property
    def tokens(self) -> Tensor:
        """Token ids, [n] int32."""
        return self._tokens[: self._count]

    @property
    def kinds(self) -> Tensor:
        """Kinds of the tokens, [n] uint8."""
        return self._kinds[: self._count]

    def add(self, tokens: Tensor, kinds: Tensor, lengths: list[int]) -> bool:
        """Append conversations; False if there is no room for all of them, and none was added."""
        count = len(tokens)
        if self._count + count > len(self._tokens):
            return False
        self._count += count
        self.tokens[-count:], self.kinds[-count:] = tokens, kinds
        self.lengths += lengths
        return True


class Conversations:
    """A batch of conversations, each at a place of its own."""

    def __init__(
        self, weights: Weights, script: Script, *, batch: int, slots: int, seed: int = 0
    ) -> None:
        """Open `batch` conversations of at most `slots` tokens."""
        device = weights.embedding.device
        self._decoder = Decoder(weights, batch, slots)
        self._slots, self._end = slots, script.end
        self._openings = torch.from_numpy(script.openings).to(device)
        self._to_answer = torch.tensor(script.to_answer, dtype=torch.int32, device=device)
        self._to_user = torch.tensor(script.to_user, dtype=torch.int32, device=device)
        self._next_opening = 0
        self._random = torch.Generator().manual_seed(seed)
        self._rows = torch.arange(batch, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(batch, slots)
        """[batch, slots]: -1 where none is chosen or written yet."""
        self.kinds = zeros(batch, slots, dtype=torch.uint8)
        self._at = zeros(batch)
        """Place of the token that is read next."""
        self._length = zeros(batch)
        """Tokens of the message so far."""
        self._turns = zeros(batch)
        """User's messages after this one."""
        self._temperature = zeros(batch, dtype=torch.float32)
        """Of the answers; 0: greedy."""
        self._is_answer = zeros(batch, dtype=torch.bool)
        self.is_over = zeros(batch, dtype=torch.bool)
        self._open(self._rows)

    def run(self, steps: int) -> None:
        """Take steps; on a GPU by a CUDA graph, because a step has hundreds of small launches."""
        if self._rows.is_cuda and self._graph is None:
            self._graph = self._captured()
        for _ in range(steps):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()

    def end_loops(self) -> None:
        """End answers that repeat themselves, and mark them as loops."""
        steps = torch.arange(1 - TAIL, 1, device=self._rows.device)

        def tail(back: int) -> Tensor:
            """[batch, TAIL]: tokens up to `back` before the last."""
            place = self._at.long()[:, None] - back + steps
            return self.tokens.gather(1, place.clamp(min=0))

        is_long = self._is_answer & (self._length > 2 * TAIL) & ~self.is_over
        last = tail(0)
        repeats = torch.zeros_like(is_long)
        for back in range(1, PERIOD + 1):
            repeats |= (tail(back) == last).all(1)
        looped = is_long & repeats
        first = (self._at - self._length + 1)[:, None]
        columns = torch.arange(self._slots, device=self._rows.device)
        self.kinds.masked_fill_(looped[:, None] & (columns >= first), LOOP)
        self.is_over |= looped

    def harvest(self, corpus: Corpus) -> bool:
        """Move conversations that are over to `corpus`, and open others; False if it is full."""
        over = self.is_over.nonzero().flatten()
        if not len(over):
            return True
        last = self._at[over].long()
        # The last token was chosen, and not read.
        lengths = last + 1 + (self.tokens[over, last + 1] >= 0)
        is_token = torch.arange(self._slots, device=over.device) < lengths[:, None]
        tokens, kinds = self.tokens[over][is_token], self.kinds[over][is_token]
        has_room = corpus.add(tokens, kinds, lengths.tolist())
        self._open(over)
        return has_room

    def _open(self, rows: Tensor) -> None:
        """Begin new conversations in `rows`."""
        count = len(rows)
        numbers = torch.arange(count, device=rows.device) + self._next_opening
        self._next_opening += count
        openings = self._openings[numbers % len(self._openings)]
        self.tokens[rows] = -1
        self.tokens[rows, : openings.shape[1]] = openings
        self.kinds[rows] = TEMPLATE
        for counter in (self._at, self._length):
            counter[rows] = 0
        for flag in (self._is_answer, self.is_over):
            flag[rows] = False
        turns, sampled = torch.rand(2, count, generator=self._random).to(rows.device)
        self._turns[rows] = (turns < SECOND_TURN).int() + (turns < THIRD_TURN).int()
        self._temperature[rows] = torch.where(sampled < SAMPLED, ANSWER_TEMPERATURE, 0.0)

    def _captured(self) -> "torch.cuda.CUDAGraph":
        # Kernels are compiled, and memory is allocated, before the capture and in a stream of its
        # own, as torch's documentation asks.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _step(self) -> None:
        """Read a token of each conversation and write the next. All changes are made in place."""
        here, after = self._at.long(), self._at.long() + 1
        tokens = self.tokens[self._rows, here].long()
        logits = self._decoder.step(tokens, self._at)
        written, kinds = self.tokens[self._rows, after], self.kinds[self._rows, after]
        is_live = ~self.is_over
        is_chosen = is_live & (written < 0)
        next_tokens = torch.where(is_chosen, self._choices(logits), written)
        self.tokens[self._rows, after] = next_tokens
        speakers = torch.where(self._is_answer, ANSWER, USER).to(torch.uint8)
        self.kinds[self._rows, after] = torch.where(is_chosen, speakers, kinds)
        self._length += is_chosen
        is_done = self._turn(is_chosen & (next_tokens == self._end), after)
        longest = torch.where(self._is_answer, LONGEST_ANSWER, LONGEST_PROMPT)
        room = max(len(self._to_answer), len(self._to_user)) + 2
        is_done |= is_live & ((after >= self._slots - room) | (self._length >= longest))
        self._at += is_live & ~is_done
        self.is_over |= is_done

    def _choices(self, logits: Tensor) -> Tensor:
        """[batch] int32: a sample of softmax(logits / temperature), or the best at 0."""
        temperatures = torch.where(self._is_answer, self._temperature, USER_TEMPERATURE)
        scores = logits.float()
        best = scores.argmax(-1)
        scores = scores / temperatures.clamp(min=1e-3)[:, None]
        lowest = scores.amax(-1, keepdim=True) + math.log(LEAST)
        scores = scores.masked_fill(scores < lowest, -torch.inf)
        # Gumbel's trick: the highest of score - log(exponential noise) is a sample of the softmax.
        sample = (scores - torch.empty_like(scores).exponential_().log()).argmax(-1)
        return torch.where(temperatures > 0, sample, best).int()

    def _turn(self, is_end: Tensor, place: Tensor) -> Tensor:
        """Write the template after messages that end at `place`; True where it was the last."""
        to_answer = is_end & ~self._is_answer
        to_user = is_end & self._is_answer & (self._turns > 0)
        for is_turn, text in ((to_answer, self._to_answer), (to_user, self._to_user)):
            columns = place[:, None] + 1 + torch.arange(len(text), device=place.device)
            columns = columns.clamp(max=self._slots - 1)  # of conversations that have no room
            rows = self._rows[:, None]
            before = self.tokens[rows, columns]
            self.tokens[rows, columns] = torch.where(is_turn[:, None], text, before)
        turns = to_answer | to_user
        self._is_answer ^= turns
        self._length.masked_fill_(turns, 0)
        self._turns -= to_user.int()
        return is_end & ~turns


def converse(conversations: Conversations, corpus: Corpus, is_time_up: Callable[[], bool]) -> None:
    """Fill `corpus` until the time is up or it is full; unfinished conversations are lost."""
    while not is_time_up():
        conversations.run(STEPS)
        conversations.end_loops()
        if not conversations.harvest(corpus):
            return
