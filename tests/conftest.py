"""How hypothesis searches: briefly and the same every time, or, if asked, for long.

The default run is short and gives the same result twice. `pytest --hypothesis-profile=long` looks
further, at random. A slow machine is not a failure, so no example has a deadline.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("short", max_examples=40, deadline=None, derandomize=True, database=None)
settings.register_profile("long", max_examples=500, deadline=None)
settings.load_profile("short")
