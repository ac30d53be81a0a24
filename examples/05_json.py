"""Get an answer that is JSON of a schema; `regex` and `grammar` work in the same way."""

import json

import paceline

schema = {
    "type": "object",
    "properties": {
        "season": {"enum": ["spring", "summer", "autumn", "winter"]},
        "months": {"type": "integer", "minimum": 1, "maximum": 12},
    },
    "required": ["season", "months"],
    "additionalProperties": False,
}

with paceline.load() as model:
    answer = model.generate("Which season is the coldest?", json_schema=schema)
    print(json.loads(answer.text)["season"])
    print(model.generate("Is ice cold?", regex="yes|no").text)
