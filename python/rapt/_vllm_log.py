"""What rapt says in vLLM's log: each line once in a process."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

logger: Any = init_logger("vllm.rapt")  # vLLM's handlers are those of the name "vllm"


def say_taken(what: str) -> None:
    logger.info_once("rapt computes %s (RAPT_VLLM=0 switches it off).", what)


def say_left(what: str, reason: str) -> None:
    logger.warning_once("rapt leaves %s to vLLM: %s.", what, reason)
