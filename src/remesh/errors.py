"""Every exception that remesh raises on purpose, in one tree.

::

    RemeshError
    ├── StateError (ValueError)            the state handed to save or load is not usable
    │   ├── UnsupportedValueError          a value has no safe encoding; names its path and type
    │   ├── NameCollisionError             two entries of the state have the same stored name
    │   ├── DivergedReplicaError           ranks disagree about something they should agree on
    │   └── CoverageError                  the boxes of a tensor leave a hole or overlap
    ├── OptionError (ValueError)           an option has a wrong type or value
    ├── MismatchError (ValueError)         state and checkpoint do not fit; carries the lists
    ├── TransformError (ValueError)        a transformation is malformed or does not fit
    ├── CheckpointError                    something is wrong with a checkpoint
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   ├── CheckpointExistsError (FileExistsError)
    │   ├── CorruptCheckpointError         bytes differ from what was written
    │   ├── CheckpointReplacedError        another save replaced it while it was read
    │   ├── FormatVersionError             written by a newer remesh
    │   └── PickleRefusedError             a foreign pickle asks for a class that is not allowed
    ├── StorageError (OSError)             storage refused or failed
    │   ├── NoSpaceError                   too little room, found before writing or while writing
    │   └── NotSharedError                 ranks of one save write to different places
    ├── ExchangeError (RuntimeError)       ranks could not talk to each other
    ├── MasterError                        a job's master refuses a request or is not reached
    ├── ClusterError                       Kubernetes refuses a request or is not reached
    ├── AgentLostError (RuntimeError)      the agent that started this process has ended
    └── RankFailedError (RuntimeError)     another rank failed with an exception of its own kind

`WorldChangedError` is outside of the tree: it is no `Exception`, so that a training function does
not catch it by mistake.

A collective call that fails raises on every rank. Exceptions of this tree arrive on the other
ranks as the same class with the same message and `rank` set to where they came from; any other
exception arrives as `RankFailedError`.

Those that a training script catches are documented at the top level, so `__all__` has the others.
"""

from __future__ import annotations

__all__ = [
    "AgentLostError",
    "CheckpointError",
    "CheckpointReplacedError",
    "ClusterError",
    "CoverageError",
    "DivergedReplicaError",
    "ExchangeError",
    "FormatVersionError",
    "MasterError",
    "NameCollisionError",
    "NoSpaceError",
    "NotSharedError",
    "OptionError",
    "PickleRefusedError",
    "RankFailedError",
    "StateError",
    "TransformError",
    "UnsupportedValueError",
    "WorldChangedError",
]


class RemeshError(Exception):
    """Base class of all errors of remesh except `WorldChangedError`."""

    rank: int | None = None
    """The rank on which the error arose, or None if it arose here or outside a collective call."""


class StateError(RemeshError, ValueError):
    """The state handed to `save` or `load` cannot be used as it is."""


class UnsupportedValueError(StateError):
    """A value has no safe encoding, or a tensor is of a kind that cannot be stored."""


class NameCollisionError(StateError):
    """Two different entries of the state would be stored under one name."""


class DivergedReplicaError(StateError):
    """Ranks hold different values where one common value was expected."""


class CoverageError(StateError):
    """The boxes that ranks hold of a tensor leave a hole, overlap or leave its bounds."""


class OptionError(RemeshError, ValueError):
    """An option of a call has a wrong type or value; it was found before anything began."""


class MismatchError(RemeshError, ValueError):
    """The state and the checkpoint do not fit: names, shapes, dtypes or kinds differ.

    Nothing has been changed in the state when this is raised.

    Attributes:
        missing: Names that the state has and the checkpoint lacks.
        unexpected: Names that the checkpoint has and the state lacks (filled only if the
            caller chose an error on them).
        conflicts: One line for each name whose shape, dtype or kind differs.
    """

    def __init__(
        self,
        message: str,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        conflicts: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.conflicts = conflicts


class TransformError(RemeshError, ValueError):
    """A statement of a transformation is malformed, or does not fit the tensors it is applied to.

    The message shows the statement with a caret under the fault and what each macro in it became.
    """


class CheckpointError(RemeshError):
    """Something is wrong with a checkpoint as a whole."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at the given place."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """There is a committed checkpoint already, and `overwrite` is false."""


class CorruptCheckpointError(CheckpointError):
    """Stored bytes are missing or differ from what was written."""


class CheckpointReplacedError(CheckpointError):
    """Another save replaced the checkpoint, or it was removed, while it was being read.

    Nothing is damaged: what is there now can be opened. Loads begin anew by themselves, all ranks
    together, and raise this only if the checkpoint was replaced again and again.
    """


class FormatVersionError(CheckpointError):
    """The checkpoint was written in a format version that this remesh does not know."""


class PickleRefusedError(CheckpointError):
    """A pickle of another system names a class or function that is not on the allowed list.

    Attributes:
        type_name: The qualified name in the pickle.
    """

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name


class StorageError(RemeshError, OSError):
    """The storage refused or failed an operation."""


class NoSpaceError(StorageError):
    """The storage has too little free space."""


class NotSharedError(StorageError):
    """Ranks of one save write to different places, so rank 0 does not see all files."""


class ExchangeError(RemeshError, RuntimeError):
    """Ranks could not exchange messages: a peer died, or a deadline passed."""


class MasterError(RemeshError):
    """A job's master refuses a request, or cannot be reached."""


class ClusterError(RemeshError):
    """The API server of Kubernetes refuses a request, or cannot be reached."""


class AgentLostError(RemeshError, RuntimeError):
    """The agent (`remesh run`) that started this process has ended, so the process must end too."""


class RankFailedError(RemeshError, RuntimeError):
    """Another rank failed with an exception that is not remesh's own.

    Attributes:
        error_type: The qualified name of the exception's type on the rank where it arose.
    """

    def __init__(self, message: str, error_type: str = "") -> None:
        super().__init__(message)
        self.error_type = error_type


class WorldChangedError(BaseException):
    """The world of the job changes: a training function under `remesh.elastic.run` has to end.

    It is raised inside the function, which is entered again afterwards. Do not catch it.
    """
