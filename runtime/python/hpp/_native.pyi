"""The runtime's classes, as compiled. `hpp` gives them defaults, NumPy and documentation."""

from typing import Any, final

VERSION: str

def read_plan(path: str) -> tuple[str, str, list[int]]: ...
def onnxruntime_library(package: str) -> str | None: ...
@final
class Engine:
    @staticmethod
    def load(
        path: str,
        *,
        package: str | None,
        library: str | None,
        threads: int | None,
        context: int | None,
        strict: bool,
        providers: list[str],
        ep_lib: list[str],
        ep_option: list[str],
        weights: str,
        pinned: int | None,
        verify_weights: bool,
        ngram_drafts: bool,
    ) -> Engine: ...
    def generate(
        self,
        prompt: list[int],
        *,
        max_new: int | None,
        stop: list[str],
        ignore_eos: bool,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        min_p: float | None,
        repetition_penalty: float | None,
        seed: int | None,
        reuse: str,
        logits: bool,
    ) -> Generation: ...
    def logits(self, tokens: list[int], only_last: bool) -> tuple[bytearray, int, int]: ...
    def encode(self, text: str, special: bool) -> list[int]: ...
    def encode_messages(self, messages: list[tuple[str, str]]) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...
    def take_warnings(self) -> list[str]: ...
    @property
    def context(self) -> int: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    @property
    def has_tokenizer(self) -> bool: ...
    @property
    def threads(self) -> int: ...
    @property
    def library(self) -> str: ...
    @property
    def load_ms(self) -> float: ...

@final
class Generation:
    def next_text(self) -> str | None: ...
    def answer(self) -> dict[str, Any]: ...
    def cancel(self) -> None: ...
