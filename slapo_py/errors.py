"""One exception class per cause. Every message names the primitive, the place, what was found and the remedy."""

from typing import Any


class ScheduleError(Exception):
    """Root of every error that slapo_py raises for a schedule that can't be carried out."""


class PathError(ScheduleError):
    """A path names no module of this model."""


class StaleCursorError(PathError):
    """A cursor's place was removed by a later step."""


class NoMatchError(ScheduleError):
    """A glob or a pattern found nothing."""


class ArgumentError(ScheduleError):
    """A primitive was given arguments that it doesn't take."""


class NoExampleInputs(ScheduleError):
    """A primitive needs to know what the model is called with, and the schedule has no example inputs."""


class TraceError(ScheduleError):
    """A module can't become a static graph; the message names the user's file and line."""


class GuardError(ScheduleError):
    """A traced module was called in a way that its trace does not cover, and the original can't stand in for it."""


class HistoryError(ScheduleError):
    """A history can't be saved, loaded, replayed or undone."""


class RegistryError(ScheduleError):
    """A primitive can't be registered."""


class CloneError(ScheduleError):
    """A model holds something that can't be cloned structurally."""


class StepError(ScheduleError):
    """A step contradicts one that was applied before."""


class BuildError(ScheduleError):
    """A schedule can't be built for this target with these arguments."""


class CheckpointError(ScheduleError):
    """A saved engine is missing, incomplete or belongs to another model."""


class EngineError(ScheduleError):
    """An engine was given a batch, a loss or a count that it can't train on."""


class RecomputeError(ScheduleError):
    """A checkpointed module was called in a way in which running it again would give other numbers."""


class PatternError(ScheduleError):
    """A pattern can't be what it is written as: it uses something that no graph can hold, or falls apart."""


class PlacementError(ScheduleError):
    """A tensor can't lie on a mesh as it should: a dim, a block or a conversion that there is not."""


class ShardError(ScheduleError):
    """A parameter can't be split as a schedule asks."""


class StaleMatchError(ScheduleError):
    """A match was found in a graph that a later step has changed."""


class VerificationError(ScheduleError):
    """A scheduled model does not compute what the original does; `report` holds all that was compared."""

    report: Any = None


class RankError(ScheduleError):
    """A process that runs for this one has raised, ended, or given no answer. rank: which; where many did, the first.

    Its own error is the cause (`__cause__`), if it could be sent.
    """

    rank: int = -1
