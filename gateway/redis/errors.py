"""Errors of commands to Redis."""

from redis.exceptions import RedisError

# Raised by a command if Redis does not answer, or answers with an error.
REDIS_ERRORS = (RedisError, OSError)
