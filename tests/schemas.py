"""200 JSON schemas, made by hand after those that applications use: entities and forms of them.

Every string, list and number has bounds, so that a text under a schema comes to an end whatever
writes it.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(most: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most} | more


def whole(least: int = 0, most: int = 999) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def listed(items: Schema, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def entity(optional: tuple[str, ...] = (), **properties: Schema) -> Schema:
    required = [name for name in properties if name not in optional]
    kind: Schema = {"type": "object", "properties": properties, "required": required}
    return kind | {"additionalProperties": False}


FLAG: Schema = {"type": "boolean"}
DATE = {"type": "string", "pattern": "^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$"}
TIME = {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"}
HEX = {"type": "string", "pattern": "^#[0-9a-f]{6}$"}
SLUG = {"type": "string", "pattern": "^[a-z][a-z0-9-]{1,10}$"}
VERSION = {"type": "string", "pattern": "^[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,2}$"}
MAIL = {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.(com|org)$"}

PERSON = entity(name=text(), age=whole(0, 120), email=MAIL)
ADDRESS = entity(("unit",), street=text(), city=text(), zip=whole(10000, 99999), unit=text(4))
MONEY = entity(amount=whole(0, 99999), currency=one_of("EUR", "USD", "GBP"))

ENTITIES: dict[str, Schema] = {
    "person": PERSON,
    "address": ADDRESS,
    "money": MONEY,
    "order": entity(id=whole(1), items=listed(SLUG, 3, 1), total=MONEY, paid=FLAG),
    "event": entity(("end",), title=text(), day=DATE, start=TIME, end=TIME),
    "package": entity(("license",), name=SLUG, version=VERSION, license=one_of("MIT", "BSD")),
    "issue": entity(title=text(20), state=one_of("open", "closed"), labels=listed(SLUG)),
    "container": entity(image=SLUG, ports=listed(whole(1, 65535), 2), restart=FLAG),
    "point": entity(type={"const": "Point"}, coordinates=listed(whole(-90, 90), 2, 2)),
    "weather": entity(city=text(), celsius=whole(-40, 50), sky=one_of("clear", "rain", "snow")),
    "review": entity(("comment",), stars=whole(1, 5), comment=text(30)),
    "recipe": entity(name=text(), minutes=whole(1, 240), ingredients=listed(text(), 4, 1)),
    "flight": entity(code=text(6), gate=text(3), departs=TIME, delayed=FLAG),
    "colour": entity(name=SLUG, value=HEX),
    "call": entity(name=one_of("search", "open"), arguments=entity(query=text(20))),
    "verdict": entity(reason=text(30), answer=one_of("yes", "no", "unsure")),
    "sentiment": entity(label=one_of("positive", "neutral", "negative"), score=whole(0, 100)),
    "book": entity(("year",), title=text(20), author=PERSON, year=whole(1450, 2030)),
    "setting": entity(key=SLUG, value={"anyOf": [FLAG, whole(), text()]}),
    "contact": entity(phone={"type": "string", "pattern": "^\\+[0-9]{6,10}$"}, address=ADDRESS),
    "score": entity(home=whole(0, 9), away=whole(0, 9), over=FLAG),
    "node": entity(("next",), id=whole(), next={"anyOf": [{"type": "null"}, entity(id=whole())]}),
    "log": entity(level=one_of("debug", "info", "error"), at=TIME, message=text(30)),
    "job": entity(cron=one_of("@daily", "@hourly"), command=listed(SLUG), retries=whole(0, 5)),
    "answer": entity(steps=listed(text(20), 3), result={"anyOf": [whole(-99, 99), text(8)]}),
}


def forms(name: str, schema: Schema) -> dict[str, Schema]:
    """Eight schemas from one."""
    own, wrapped = {"$ref": f"#/$defs/{name}"}, {"$defs": {name: schema}}
    nothing: Schema = {"type": "null"}
    return {
        name: schema,
        f"{name} list": listed(schema, 2, 1),
        f"{name} or nothing": {"anyOf": [schema, nothing]},
        f"{name} by reference": wrapped | entity(value=own),
        f"{name} pair": wrapped | entity(first=own, second=own),
        f"{name} page": entity(items=listed(schema, 2), total=whole(0, 99), next=FLAG),
        f"{name} result": {
            "oneOf": [
                entity(kind={"const": "value"}, value=schema),
                entity(kind={"const": "error"}, message=text()),
            ]
        },
        f"{name} without extras": {key: schema[key] for key in ("type", "properties")}
        | {"required": schema["required"][:1], "additionalProperties": False},
    }


SCHEMAS: dict[str, Schema] = {
    name: schema for own, made in ENTITIES.items() for name, schema in forms(own, made).items()
}
