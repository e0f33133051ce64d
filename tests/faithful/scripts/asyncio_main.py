"""asyncio: tasks, a subprocess, a thread, an exception that is never retrieved."""

import asyncio
import os
import sys


async def fails():
    raise OSError("nobody fetches this")


async def count(name, turns):
    for _ in range(turns):
        await asyncio.sleep(0)
    return name, turns


async def main():
    print(await asyncio.gather(count("a", 3), count("b", 1)))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "print('child')", stdout=asyncio.subprocess.PIPE
    )
    print((await process.communicate())[0], process.returncode)
    print(await asyncio.to_thread(os.environ.get, "LOCAL_RANK"))
    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    del task
    try:
        await asyncio.wait_for(asyncio.Event().wait(), 0.01)
    except TimeoutError:
        print("timeout")


asyncio.run(main())
print("done")
