"""``up`` on a machine that is short of memory or of threads. Real processes, tiny programs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import pytest
from tests.unit.cli.test_children import SLEEP, Witness, program

from pagemesh.cli.mesh.children import ChildLost, wait_without_threads


async def test_a_child_that_somebody_kills_again_and_again_is_given_up_with_a_word_on_memory() -> (
    None
):
    witness = Witness()
    code = "import os; os.kill(os.getpid(), 9)"
    async with witness.watch(program("a", code)) as mesh:
        failure = await mesh.failed()
    assert "given up: killed (SIGKILL), as Linux does when memory runs out;" in str(failure)


async def test_a_server_that_may_start_no_thread_is_no_configuration_error() -> None:
    witness = Witness()
    code = """if True:
    import sys
    print("runtime: failed to create new OS thread (have 4 already; errno=11)")
    print("fatal error: newosproc")
    print("runtime/mgc.go:214 +0x66")
    sys.exit(2)"""
    async with witness.watch(program("a", code)) as mesh:
        failure = await mesh.failed()
    assert isinstance(failure, ChildLost)
    assert "no more threads may be started" in str(failure)
    assert "its last words: runtime: failed to create new OS thread" in str(failure)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="newer Pythons do so by themselves")
def test_children_are_waited_for_without_a_thread_each() -> None:
    async def waited_for() -> None:
        witness = Witness()
        async with witness.watch(program("a", SLEEP)) as mesh:
            await witness.until(lambda: "up" in witness.lines)
            assert not [one for one in threading.enumerate() if "waitpid" in one.name]
            os.kill((await witness.pids(mesh))[0], signal.SIGKILL)
            await witness.until(lambda: ("a", "died (SIGKILL)") in witness.changes)

    wait_without_threads()
    try:
        asyncio.run(waited_for())
    finally:
        asyncio.set_child_watcher(asyncio.ThreadedChildWatcher())
