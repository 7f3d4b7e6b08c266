"""What is a checkpoint, which is newest, which is unfinished or damaged: the only scanner.

The manager, the command line, the rescue of snapshots, and the interfaces of other systems ask this
package. `list_checkpoints` reads the commit records of a directory and the small files beside them;
`scan` also compares the sizes of files, and finds unfinished saves.
"""

from remesh.catalog.checkpoints import NOTE_KEY as NOTE_KEY
from remesh.catalog.checkpoints import (
    CheckpointInfo,
    ManagerNote,
    Provenance,
    lease,
    pin,
    unpin,
)
from remesh.catalog.checkpoints import Entry as Entry
from remesh.catalog.checkpoints import TrackerRun as TrackerRun
from remesh.catalog.checkpoints import age_key as age_key
from remesh.catalog.checkpoints import best_effort as best_effort
from remesh.catalog.checkpoints import committed_names as committed_names
from remesh.catalog.checkpoints import describe_findings as describe_findings
from remesh.catalog.checkpoints import explained_absence as explained_absence
from remesh.catalog.checkpoints import files_of as files_of
from remesh.catalog.checkpoints import finish_removals as finish_removals
from remesh.catalog.checkpoints import finite as finite
from remesh.catalog.checkpoints import forget_failures as forget_failures
from remesh.catalog.checkpoints import forget_replaced as forget_replaced
from remesh.catalog.checkpoints import is_checkpoint as is_checkpoint
from remesh.catalog.checkpoints import is_pinned as is_pinned
from remesh.catalog.checkpoints import list_checkpoints as list_checkpoints
from remesh.catalog.checkpoints import natural_key as natural_key
from remesh.catalog.checkpoints import newest_entry as newest_entry
from remesh.catalog.checkpoints import newest_of as newest_of
from remesh.catalog.checkpoints import note_failure as note_failure
from remesh.catalog.checkpoints import note_of as note_of
from remesh.catalog.checkpoints import nothing_at as nothing_at
from remesh.catalog.checkpoints import place_of as place_of
from remesh.catalog.checkpoints import read_record_and_sizes as read_record_and_sizes
from remesh.catalog.checkpoints import release as release
from remesh.catalog.checkpoints import remove as remove
from remesh.catalog.checkpoints import scan as scan
from remesh.catalog.checkpoints import step_name as step_name
from remesh.catalog.checkpoints import with_record as with_record

__all__ = ["CheckpointInfo", "ManagerNote", "Provenance", "lease", "pin", "unpin"]
