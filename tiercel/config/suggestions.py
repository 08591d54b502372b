"""Guess what the user meant: the nearest real key, or the nearest word that a key accepts."""

from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches

from tiercel.config.keys import ENTRY, Key, every_key
from tiercel.config.synonyms import NOT_YET, Suggestion, key_synonyms, section_synonyms, word_synonyms


def nearest_key(path: str) -> Suggestion:
    """Find what to write instead of the unknown dotted key `path`; an empty suggestion if nothing is near.

    Names from other frameworks come first, then the same name in another section, then similar spelling. The suggestion
    may be a key that only another kind of recipe has; the caller says so.
    """
    parts = [_normalised(part) for part in path.split(".")]
    for start in range(len(parts)):
        suggestion = key_synonyms().get(".".join(parts[start:]))
        if suggestion is not None:
            return _at(suggestion, path)
    keys = list(every_key())
    leaf, section = parts[-1], _real_section(parts[:-1])
    siblings = [key for key in keys if key.parent == section]
    same_name = [key for key in siblings if key.leaf == leaf] or [key for key in keys if key.leaf == leaf]
    if not same_name:
        near = get_close_matches(leaf, [key.leaf for key in siblings], n=1, cutoff=0.6)
        same_name = [key for key in siblings if key.leaf in near]
    if same_name:
        return _at(Suggestion(key=_most_similar(same_name, path).path), path)
    return _at(_similar_anywhere(leaf, path, keys), path)


def _similar_anywhere(leaf: str, path: str, keys: Sequence[Key]) -> Suggestion:
    names = [key.leaf for key in keys] + [name for name in key_synonyms() if len(name) > 4]
    near = get_close_matches(leaf, names, n=1, cutoff=0.75)
    if not near:
        return Suggestion()
    same_name = [key for key in keys if key.leaf == near[0]]
    return Suggestion(key=_most_similar(same_name, path).path) if same_name else key_synonyms()[near[0]]


def _real_section(parts: Sequence[str]) -> str:
    """Find the section that a dotted prefix names or nearly names; the top level if there is none."""
    sections = [key.path for key in every_key() if key.section is not None]
    numbered = [ENTRY if part.isdigit() else part for part in parts]
    numbered[:1] = [section_synonyms().get(name, name) for name in numbered[:1]]
    entries = [f"{name}.{ENTRY}" for name in sections]
    near = get_close_matches(".".join(numbered), [*sections, *entries], n=1, cutoff=0.7)
    return near[0] if near else ""


def _most_similar(keys: Sequence[Key], path: str) -> Key:
    return max(keys, key=lambda key: SequenceMatcher(None, key.path, path).ratio())


def _at(suggestion: Suggestion, path: str) -> Suggestion:
    """Fill in the entry numbers of the suggestion: those of `path`, or else 0 (`rewards.N.call` ->
    `rewards.1.call`)."""
    if suggestion.key is None:
        return suggestion
    numbers = iter([part for part in path.split(".") if part.isdigit()])
    parts = [next(numbers, "0") if part == ENTRY else part for part in suggestion.key.split(".")]
    return Suggestion(key=".".join(parts), hint=suggestion.hint)


def _normalised(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def nearest_word(key: str, given: str, allowed: Sequence[str]) -> Suggestion:
    """Find the accepted word that `given` most likely means. `key` is the name as declared (`rewards.N.name`)."""
    word = given.strip().lower()
    synonyms = word_synonyms().get(key, {})
    if word in synonyms:
        target = synonyms[word]
        return Suggestion(hint=f"{given} is {NOT_YET}") if target is None else Suggestion(key=target)
    near = get_close_matches(word, [*allowed, *(name for name, target in synonyms.items() if target)], n=1, cutoff=0.6)
    if not near:
        return Suggestion()
    return Suggestion(key=near[0] if near[0] in allowed else str(synonyms[near[0]]))
