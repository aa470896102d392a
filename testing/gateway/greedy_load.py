"""Steady greedy requests whose answers are known, to show that no request fails while a fleet changes."""

import asyncio
from itertools import cycle
from typing import Any

from testing.gateway.running import Client, until

ASK = {"messages": [{"role": "user", "content": "The quick brown fox in Köln"}], "max_tokens": 6, "temperature": 0}


def tokens_of(answer: Any) -> tuple[int, int]:
    return answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


def text_of(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"]


class Load:
    """Requests to some models, one after another for each, until `stop`. Every answer must equal the expected one.

    clients: the same tenant's, of one gateway each. A model's requests go to them in turn.
    """

    def __init__(self, *clients: Client) -> None:
        self._clients = clients
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.served: dict[str, int] = {}
        self.wrong: list[Any] = []

    def start(self, model: str, expected: str) -> None:
        self.served[model] = 0
        self._tasks[model] = asyncio.create_task(self._run(model, expected))

    async def stop(self, *models: str) -> None:
        for model in models or tuple(self._tasks):
            self._tasks.pop(model).cancel()
        await asyncio.sleep(0)

    async def _run(self, model: str, expected: str) -> None:
        for client in cycle(self._clients):
            answer = await client.chat(**ASK, model=model)
            if answer.status == 200 and text_of(answer.json) == expected:
                self.served[model] += 1
            else:
                self.wrong.append((model, client.url, answer.status, answer.body))

    async def rounds(self) -> None:
        """Wait until each gateway has served a request to each model that began after this call."""
        goal = {model: self.served[model] + 1 + len(self._clients) for model in self._tasks}

        async def reached() -> bool:
            return bool(self.wrong) or all(self.served[model] >= least for model, least in goal.items())

        await until(reached)
        assert self.wrong == []
