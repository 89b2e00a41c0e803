"""How large the workloads of the peer comparison are: in full, and tiny for a test."""

from __future__ import annotations

from dataclasses import dataclass

PAGE_SIZE = 64
VOCAB_SIZE = 129_280
WINDOW = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts of every workload.

    Attributes:
        rounds: Turns that every implementation gets.
        step_rounds: The same for scheduler steps, which take less time and vary more.
        conversations: Conversations of `chat`, which share a system prompt of one turn.
        turn_tokens: Tokens that a conversation grows by in a turn.
        chat_tokens: Length at which it ends.
        sysmix_prompts: Prompts of `sysmix`: a system prompt of 2,048 tokens and 512 own ones.
        leaves: Unrelated prompts of 512 tokens that fill the cache of `evict`.
        evictions: Operations measured with each of them, at most.
        evict_cpu_s: CPU time after which fewer will do.
        memory_prompts: Prompts of 512 tokens that memory is measured with.
        running: Running requests of `decode`.
        prompt_tokens: Their prompts.
        steps: Steps in a round.
        long_tokens: The prompt that arrives beside them.
        chunk: Tokens of it in a step.
        is_released_vocabulary: Text runs with the released model's vocabulary, if it is installed.
        short_prompts: Prompts of about 1,000 tokens to encode.
        long_chars: Characters of the long text.
        streams: Streams to detokenise.
        stream_steps: Tokens of each in a round.
    """

    rounds: int = 3
    step_rounds: int = 7
    conversations: int = 8
    turn_tokens: int = 4096
    chat_tokens: int = 131_072
    sysmix_prompts: int = 2000
    leaves: tuple[int, ...] = (1024, 8192, 65_536)
    evictions: int = 1000
    evict_cpu_s: float = 1.0
    memory_prompts: int = 16_384
    running: tuple[int, ...] = (64, 256, 1024)
    prompt_tokens: int = 1024
    steps: int = 64
    long_tokens: int = 131_072
    chunk: int = 8192
    is_released_vocabulary: bool = True
    short_prompts: int = 50
    long_chars: int = 440_000
    streams: tuple[int, ...] = (64, 1024)
    stream_steps: int = 100

    @property
    def tokens_of_steps(self) -> int:
        """Output tokens that a running request needs room for in all rounds."""
        chunks = -(-self.long_tokens // self.chunk)
        prefill_steps = max(self.running) * self.prompt_tokens // self.chunk
        return (self.steps + 2 * chunks + 20) * self.step_rounds + prefill_steps + 100


FULL = Sizes()
TINY = Sizes(
    rounds=1,
    step_rounds=1,
    conversations=2,
    turn_tokens=256,
    chat_tokens=1024,
    sysmix_prompts=40,
    leaves=(16, 32),
    evictions=20,
    evict_cpu_s=0.1,
    memory_prompts=64,
    running=(4,),
    prompt_tokens=128,
    steps=4,
    long_tokens=2048,
    chunk=256,
    is_released_vocabulary=False,
    short_prompts=2,
    long_chars=8000,
    streams=(8,),
    stream_steps=20,
)
