"""The same as `fsdp_job`, and it can be entered again: a rank that dies takes its part along."""

from __future__ import annotations

from tests.elastic import fsdp_job

uninterrupted = fsdp_job.uninterrupted
Job = fsdp_job.Job
