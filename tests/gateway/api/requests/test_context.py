"""The gateway's context length for prompts equals the engine's, from the same config.json."""

import json
from pathlib import Path

from testing.gateway.running import CONTEXT, MODEL_CONFIG, running, save_model, settings
from testing.gateway.upstream import Upstream


async def test_yarn_extends_it(tmp_path: Path, upstream: Upstream, redis_url: str):
    folder = save_model(tmp_path / "yarn")
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": CONTEXT}
    config = MODEL_CONFIG | {"max_position_embeddings": CONTEXT, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    async with running(settings(tmp_path, folder, [upstream.url], redis_url)) as gateway:
        acme = await gateway.tenant("acme")
        assert (await acme.complete(prompt="a" * CONTEXT, max_tokens=CONTEXT)).status == 200
        refused = await acme.complete(prompt="a" * CONTEXT, max_tokens=CONTEXT + 1)
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
