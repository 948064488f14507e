"""The operators' limits: deadlines of calls, and the failures after which a tier gets a pause.

:class:`Limits` is the one table. To add a limit, add one row to it: name, type, description and default. Unit and name
go together: ``*_seconds`` is a duration. From the row come

- the key at the top of the configuration, since :class:`~offload_core.config.model.OffloadSettings` inherits the table;
- with :class:`PerTier`, the key of the same name in each entry of ``backends``, through :class:`LimitOverrides`;
- the value that a tier uses: ``tier.limits.load_timeout_seconds``;
- the JSON schema and the tables of the documents.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model

from offload_core.api.options import MAX_SECONDS, Seconds

_MIB = 1024 * 1024


@dataclass(frozen=True)
class PerTier:
    """Mark of a limit that a tier may have for itself.

    Args:
        example: a value for one tier, shown by editors.
    """

    example: int | str


class Limits(BaseModel):
    """All limits in force, of the whole engine or of one tier."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # no clock waits for inf seconds

    load_timeout_seconds: Annotated[
        Seconds,
        Field(gt=0, description="Base deadline of a load. Loads that miss it are recomputed."),
        PerTier("5s"),
    ] = 30.0
    load_timeout_seconds_per_mib: Annotated[
        Seconds,
        Field(description="Addition to a load's deadline for each MiB that it reads.", examples=["50ms", 0.05]),
        PerTier("50ms"),
    ] = 0.05
    store_timeout_seconds: Annotated[
        Seconds,
        Field(gt=0, description="Deadline of a store, queue included. Objects that miss it count as not stored."),
        PerTier("10s"),
    ] = 30.0
    lookup_timeout_seconds: Annotated[
        Seconds,
        Field(gt=0, description="Deadline of a lookup. A tier that misses it counts as a miss."),
        PerTier("200ms"),
    ] = 1.0
    lookup_grace_seconds: Annotated[
        Seconds,
        Field(description="Wait for the answers of the other tiers after one tier has found something to load."),
    ] = 0.02
    open_timeout_seconds: Annotated[
        Seconds,
        Field(gt=0, description="Deadline for opening a tier. If the tier misses it, the engine starts without it."),
        PerTier("10s"),
    ] = 30.0
    close_timeout_seconds: Annotated[
        Seconds,
        Field(gt=0, description="Longest wait at shutdown for a tier to close."),
        PerTier(1),
    ] = 1.0
    breaker_failures: Annotated[
        int,
        Field(
            ge=1,
            strict=True,
            description="Failures or timeouts of one operation in a row, after which the tier gets a pause.",
        ),
        PerTier(5),
    ] = 5
    breaker_pause_seconds: Annotated[
        Seconds,
        Field(gt=0, description="First pause of a failing tier. Each further pause is twice as long."),
        PerTier("1s"),
    ] = 1.0
    breaker_max_pause_seconds: Annotated[
        Seconds,
        Field(gt=0, description="Longest pause of a failing tier."),
        PerTier("60s"),
    ] = 60.0
    shutdown_timeout_seconds: Annotated[
        Seconds,
        Field(description="Longest wait at shutdown for stores that have begun."),
    ] = 3.0

    def overridden_by(self, overrides: LimitOverrides) -> Limits:
        """Return these limits, with one tier's own limits in place of the global ones."""
        own = {name: getattr(overrides, name) for name in LimitOverrides.model_fields}
        return self.model_copy(update={name: value for name, value in own.items() if value is not None})

    def load_seconds(self, nbytes: int) -> float:
        """Return the deadline of a load of ``nbytes``, counted from its begin."""
        seconds = self.load_timeout_seconds + self.load_timeout_seconds_per_mib * nbytes / _MIB
        return min(seconds, MAX_SECONDS)

    @property
    def longest_call_seconds(self) -> float:
        """The longest deadline of a call. A thread that is in one call for longer is stuck."""
        deadlines = (self.open_timeout_seconds, self.lookup_timeout_seconds, self.load_timeout_seconds)
        return max(*deadlines, self.store_timeout_seconds, self.close_timeout_seconds)


_LIFE_OF_A_TIER = ("open", "load", "lookup", "store", "close")
"""The order of keys in an entry of ``backends``; all other limits follow."""


def _override_fields() -> dict[str, Any]:
    """Return the fields of :class:`LimitOverrides`: per row with :class:`PerTier`, its type or ``None``."""
    fields: dict[str, Any] = {}
    for name, row in inspect.get_annotations(Limits, eval_str=True).items():
        kind, *marks = get_args(row)
        if isinstance(marks[-1], PerTier):
            *checks, field, mark = marks
            own = (Annotated[(kind, *checks)] if checks else kind) | None
            fields[name] = (Annotated[own, field, Field(examples=[mark.example])], None)
    places = {name: _LIFE_OF_A_TIER.index(word) for name in fields if (word := name.split("_")[0]) in _LIFE_OF_A_TIER}
    return dict(sorted(fields.items(), key=lambda field: places.get(field[0], len(_LIFE_OF_A_TIER))))


if TYPE_CHECKING:

    class LimitOverrides(BaseModel):
        """One tier's own limits; ``None`` where the global limit applies."""
else:
    LimitOverrides = create_model(
        "LimitOverrides",
        __doc__="One tier's own limits; ``None`` where the global limit applies.",
        **_override_fields(),
    )
