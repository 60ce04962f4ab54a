"""How long tests wait: as long as only what hangs can take, however busy the machine is.

A time is no verdict. Where something must come before something else, tests wait for the one, and
not for so many seconds; where something must come to an end, they wait for the end. What is left
are these limits, which tell a hang from an answer on a machine with twenty times its load.
"""

from __future__ import annotations

HANG_TIMEOUT_S = 900.0
"""What takes longer than this hangs: a call on ranks, a process."""

PROMPT_TIMEOUT_S = 300.0
"""Far below the half hour for which torch's collectives wait, and rule 3 forbids to wait.

That the times that ranks have by default keep its 10 s and 60 s is a sum, and tested as one.
"""
