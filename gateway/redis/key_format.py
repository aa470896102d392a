"""Version of the layout of keys in Redis, by which gateways of two releases know whether they can share them.

A key whose content changes gets a new name, `loraplex:<version>:...`, and FORMAT becomes that version. Gateways of one
release write both layouts and leave OLDEST. The release after it raises OLDEST and drops the former layout. Keys of
version 1 have no number in their names.
"""

from typing import Any

from gateway.redis.keys import FORMAT_KEY

# The layout that this program writes, and the oldest that a program must know to share the keys with this one.
FORMAT, OLDEST = 1, 1
# KEYS: the hash. ARGV: FORMAT, OLDEST. A newer release's values stay.
SCRIPT = """
if tonumber(ARGV[1]) > tonumber(redis.call('HGET', KEYS[1], 'newest') or '0') then
  redis.call('HSET', KEYS[1], 'newest', ARGV[1], 'oldest', ARGV[2])
end
return redis.call('HMGET', KEYS[1], 'newest', 'oldest')
"""


async def find_problem(redis: Any) -> str | None:
    """Store this program's layout unless a newer one is stored; return why the keys cannot be shared, None if they can.

    Raises RedisError, OSError.
    """
    newest, oldest = map(int, await redis.execute_command("EVAL", SCRIPT, 1, FORMAT_KEY, FORMAT, OLDEST))
    if oldest <= FORMAT:
        return None
    return (
        f"the keys are of format {newest}, of a newer release that supports programs of format {oldest} and later; "
        f"this program is of format {FORMAT}: install a newer release"
    )
