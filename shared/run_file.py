"""A run file's text: YAML and `--set a.b=value` overrides, turned into sections. Keys, types and ranges are held here.

What concerns several keys is the rules' of `config`. Every refusal names the key, its value, the rule and a remedy.
"""

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shared.errors import ConfigError
from shared.sections import RunConfig

RELATIONS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}


class _Yaml(yaml.SafeLoader):
    """YAML 1.1 that reads 1e-4, without a point, as a number, as YAML 1.2 does, and takes a key once."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := {key for key in keys if keys.count(key) > 1}:
            text = f"a section has {', '.join(sorted(twice))} twice"
            raise yaml.composer.ComposerError(None, None, text, node.start_mark)
        return node


_POWER = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$")
_Yaml.add_implicit_resolver("tag:yaml.org,2002:float", _POWER, list("-+0123456789"))


def read(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The run file with its overrides; paths as they stand there.

    Raises:
        ConfigError: it cannot be read, or a key, type or number cannot be.
    """
    try:
        tree = _parsed("config", path, path.read_text())
    except OSError as error:
        raise ConfigError("config", path, f"cannot be read ({error.strerror})", "give an existing file") from None
    except UnicodeDecodeError as error:
        raise ConfigError("config", path, f"is not UTF-8 text ({error.reason})", "give a YAML file") from None
    if not isinstance(tree, dict):
        raise ConfigError("config", path, "must be a mapping of sections", "start from deploy/configs/demo.yaml")
    for override in overrides:
        _override(tree, override)
    return _converted(tree)


def _parsed(name: str, what: object, text: str) -> Any:
    try:
        return yaml.load(text, _Yaml)
    except yaml.YAMLError as error:
        raise ConfigError(name, what, f"is not YAML ({' '.join(str(error).split())})", "mend it") from None


def _override(tree: dict[str, Any], override: str) -> None:
    dotted, sign, value = override.partition("=")
    if not sign or not dotted:
        raise ConfigError("--set", override, "must read key.key=value", "for example --set train.steps=50")
    *parents, leaf = dotted.split(".")
    for key in parents:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError("--set", override, f"goes through {key}, which is not a section", "check the dots")
    tree[leaf] = _parsed("--set", override, value)


def _converted(tree: dict[str, Any]) -> RunConfig:
    for name, number in _floats(tree, ""):
        if not math.isfinite(number):
            raise ConfigError(name, number, "must be a finite number", "set one")
    try:
        return msgspec.convert(tree, RunConfig, strict=True)
    except msgspec.ValidationError as error:
        raise _explained(str(error), tree) from None


def _floats(part: Any, name: str) -> Iterator[tuple[str, float]]:
    """Every float of the tree with its dotted name."""
    if isinstance(part, float):
        yield name, part
    elif isinstance(part, dict):
        for key, value in part.items():
            yield from _floats(value, f"{name}.{key}".lstrip("."))
    elif isinstance(part, list):
        for place, value in enumerate(part):
            yield from _floats(value, f"{name}[{place}]")


def _explained(text: str, tree: dict[str, Any]) -> ConfigError:
    where = match[1] if (match := re.search(r"at `\$\.?(.*?)`", text)) else ""
    if unknown := re.search(r"unknown field `(.*?)`", text):
        known = _fields_at(where)
        near = difflib.get_close_matches(unknown[1], known, 1)
        remedy = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        name = ".".join(filter(None, [where, unknown[1]]))
        return ConfigError(name, _given(tree, name), "is not a key of the run file", remedy)
    value, rule = _given(tree, where), text.split(" - at ")[0]
    if bound := re.fullmatch(r"Expected `\w+` (>=|>|<=|<) (\S+)", rule):
        limit = f"{float(bound[2]):.10g}"
        return ConfigError(where, value, f"must be {RELATIONS[bound[1]]} {limit}", "mend the value")
    return ConfigError(where or "config", value, f"is wrong: {rule[0].lower()}{rule[1:]}", "mend the value")


def _given(tree: Any, dotted: str) -> object:
    """The value at a dotted name, for a message; without one that can be shown in a few words, "as given"."""
    for key in re.findall(r"[^.\[\]]+", dotted):
        try:
            tree = tree[int(key) if isinstance(tree, list) else key]
        except (KeyError, TypeError, ValueError):
            return "as given"
    return "as given" if isinstance(tree, dict | list) else tree


def _fields_at(dotted: str) -> list[str]:
    kind: Any = RunConfig
    for key in filter(None, re.sub(r"\[.*?\]", "", dotted).split(".")):
        kind = next(f.type for f in msgspec.structs.fields(kind) if f.name == key)
        kind = getattr(kind, "__args__", (kind,))[0]
    return [f.name for f in msgspec.structs.fields(kind)]
