"""Structured output through gateway and engine on the demo model: valid JSON from every tenant's adapter."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from testing.stack import Tenant
from tests.engine.structured.schemas import fits

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 40_000_000},
        "kind": {"enum": ["capital", "town", "village"]},
        "sights": {"type": "array", "items": {"type": "string", "maxLength": 24}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "population", "kind", "sights"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
QUESTION = [{"role": "user", "content": "Describe Paris as a JSON object."}]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema_holds_for_the_base_and_for_every_adapter(
    tenants: dict[str, Tenant], demo: dict, temperature: float
) -> None:
    ask = {"messages": QUESTION, "response_format": FORMAT, "temperature": temperature, "max_tokens": 200, "seed": 1}
    models = [(tenant.client, model) for tenant in tenants.values() for model in (demo["base_model"], *tenant.models)]
    # All at once: a step of several requests costs hardly more than a step of one.
    with ThreadPoolExecutor(len(models)) as pool:
        answers = list(pool.map(lambda each: each[0].chat.completions.create(model=each[1], **ask), models))
    for answer in answers:
        text = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop", text
        assert fits(json.loads(text), SCHEMA), text


def test_completions_streams_and_vllms_forms(acme: Tenant, demo: dict) -> None:
    ask = {"model": demo["base_model"], "prompt": "Paris as JSON: ", "temperature": 0, "max_tokens": 200}
    whole = acme.client.completions.create(**ask, extra_body={"guided_json": SCHEMA}).choices[0].text
    assert fits(json.loads(whole), SCHEMA), whole
    chunks = acme.client.completions.create(**ask, stream=True, extra_body={"structured_outputs": {"json": SCHEMA}})
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    answer = acme.client.completions.create(**ask, extra_body={"guided_regex": "[A-Z][a-z]{2,9}!"})
    assert re.fullmatch("[A-Z][a-z]{2,9}!", answer.choices[0].text)
    answer = acme.client.completions.create(**ask, extra_body={"guided_choice": ["red", "green"]})
    assert answer.choices[0].text in ("red", "green")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"guided_regex": "a("}, "guided_regex"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ],
)
def test_a_bad_grammar_is_400_at_the_gateway_too(acme: Tenant, demo: dict, extra: dict, param: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        acme.client.chat.completions.create(model=demo["base_model"], messages=QUESTION, extra_body=extra)
    assert refused.value.body["param"] == param
