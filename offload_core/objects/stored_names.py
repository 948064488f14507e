"""The names of a tier's objects on its medium: usually their keys; encrypted objects have names of their own."""

from __future__ import annotations

from collections.abc import Sequence

from offload_core.api.keys import ObjectKey


class StoredNames:
    """The forms in which a tier's objects may be stored, each with a suffix for the pack name.

    Args:
        suffixes: one per form. New objects are stored in the first one.
    """

    def __init__(self, suffixes: Sequence[str] = ("",)) -> None:
        self._suffixes = tuple(suffixes)
        self._longest_first = sorted(filter(None, suffixes), key=len, reverse=True)  # one may be the end of another

    @property
    def forms(self) -> range:
        """The numbers of the forms."""
        return range(len(self._suffixes))

    def of(self, keys: Sequence[ObjectKey], form: int = 0) -> Sequence[ObjectKey]:
        """Return the names of objects in one form."""
        suffix = self._suffixes[form]
        return [key._replace(pack=key.pack + suffix) for key in keys] if suffix else keys

    def all_of(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Return the names of objects in every form, one form after the other."""
        return [name for form in self.forms for name in self.of(keys, form)]

    def keys_of(self, names: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Return the keys of objects by their names. A name in no form of this tier stays as it is."""
        return [self._key_of(name) for name in names]

    def has(self, name: ObjectKey) -> bool:
        """Return whether a name belongs to a form with a suffix."""
        return self._key_of(name) != name

    def _key_of(self, name: ObjectKey) -> ObjectKey:
        for suffix in self._longest_first:
            if name.pack.endswith(suffix):
                return name._replace(pack=name.pack.removesuffix(suffix))
        return name
