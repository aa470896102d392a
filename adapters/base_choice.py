"""Choice of the base model that an uploaded adapter belongs to. No torch."""

from collections.abc import Collection, Mapping

from adapters.checkpoint import AdapterCheckpoint
from adapters.manifest import AdapterError, BaseShape

TRAINED_ON = "base_model_name_or_path"


def choose_base(
    checkpoint: AdapterCheckpoint, trained_on: object, bases: Mapping[str, BaseShape], closed: Collection[str] = ()
) -> str:
    """Return the name of the adapter's base model: the one that `adapter_config.json` names, else the only candidate,
    else the only one whose shapes fit.

    trained_on: value of `base_model_name_or_path`, of any type. bases: the candidates by name, at least one. closed:
    names of base models that accept no adapters. Raises AdapterError if no base model fits, or if several do.
    """
    named = named_base(trained_on, [*bases, *closed])
    if named in closed:
        raise AdapterError(TRAINED_ON, f"the base model '{named}' takes no new adapters")
    if named is not None or len(bases) == 1:
        chosen = named or next(iter(bases))
        checkpoint.check_base(bases[chosen])
        return chosen
    fitting, problems = [], []
    for name, shape in bases.items():
        try:
            checkpoint.check_base(shape)
        except AdapterError as error:
            problems.append((name, error))
        else:
            fitting.append(name)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(f"'{name}'" for name in fitting)
        raise AdapterError("base", f"the adapter fits several base models: {names}; name its own as 'base'")
    shown = "; ".join(f"'{name}': {error.field}: {error.message}" for name, error in problems)
    raise AdapterError("base", f"the adapter fits no base model: {shown}")


def named_base(trained_on: object, names: Collection[str]) -> str | None:
    """Return the base model with this name, else the only one with the same last path component, else None."""
    if not isinstance(trained_on, str) or not trained_on:
        return None
    wanted = trained_on.rstrip("/").lower()
    equal = [name for name in names if name.lower() == wanted]
    similar = [name for name in names if _last_part(name) == _last_part(wanted)]
    return next((found[0] for found in (equal, similar) if len(found) == 1), None)


def _last_part(name: str) -> str:
    return name.lower().rpartition("/")[2]
