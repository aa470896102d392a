"""Models that accept tools: the tiny model with a chat template of either family, and the test requests."""

import json
from pathlib import Path
from typing import Any

from testing.tiny import save_model

HERMES = (
    "{% if tools %}<|start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Call: <tool_call>\n{"name": name, "arguments": object}\n</tool_call><|end|>\n{% endif %}'
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\n'
    "{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    "{% endfor %}{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA3}
USER = {"role": "user", "content": "weather?"}
CITY = {"$defs": {"City": {"enum": ["Oslo", "Rome"]}}, "properties": {"city": {"$ref": "#/$defs/City"}}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "required": ["city"], "additionalProperties": False, **CITY},
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TIME = {"type": "function", "function": {"name": "time", "description": "What `::=` it is: now", "parameters": NOTHING}}
TOOLS = [WEATHER, TIME]
HISTORY = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]


def save_tool_model(folder: Path, parser: str) -> Path:
    folder.mkdir()
    save_model(folder, max_model_len=1024)
    (folder / "chat_template.jinja").write_text(TEMPLATES[parser])
    return folder


def calls_of(events: list[Any]) -> list[dict[str, Any]]:
    """Assemble a stream's tool calls as an OpenAI client does."""
    calls: list[dict[str, Any]] = []
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                assert piece["type"] == "function"
                calls.append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    return calls


def arguments_of(call: Any) -> Any:
    return json.loads(call["function"]["arguments"])
