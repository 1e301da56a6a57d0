"""The constants of the step-time model; ``data/calibration.yaml`` has each with its meaning and where it comes from."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from moelab.data import read_yaml
from moelab.errors import BadInput


def _quotient(value: float | str) -> float:
    """A number, or two as ``884.6 / 2250``."""
    above, _, below = str(value).partition("/")
    return float(above) / float(below or 1)


@dataclass(frozen=True, kw_only=True)
class Constant:
    """How a number is known."""

    value: Annotated[float, BeforeValidator(_quotient)]
    what: str  # its meaning, with its unit
    how: Literal["measured", "quoted", "fitted", "assumed"]
    source: str  # where it comes from
    fitted_on: tuple[str, ...] = ()  # rows of the validation table that the model meets best with it

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Values of the constants; :data:`CONSTANTS` says what each means, :func:`with_values` replaces some."""

    hopper_gemm: float
    hopper_low: float
    hopper_cast: float
    blackwell_gemm: float
    blackwell_grouped: float
    blackwell_bf16_alone: float
    blackwell_low: float
    blackwell_low_wgrad: float
    blackwell_low_in_step: float
    blackwell_cast: float
    blackwell_scales_us: float
    blackwell_scales_wgrad_us: float
    blackwell_scales_us_per_mrow: float
    tile_us: float
    flex_forward: float
    flex_backward: float
    flex_tiles: float
    copy: float
    row_copy: float
    eager: float
    nvlink: float
    nccl_network: float
    deepep_network: float
    deepep_s: float
    optimizer_bytes: float
    fsdp_copy_bytes: float
    step_s: float
    data_token_s: float
    launch_s: float
    sync_s: float
    wait_s: float
    node_noise: float


CONSTANTS: Mapping[str, Constant] = TypeAdapter(dict[str, Constant]).validate_python(read_yaml("calibration.yaml"))
CALIBRATION = Calibration(**{name: constant.value for name, constant in CONSTANTS.items()})


def fitted() -> tuple[str, ...]:
    """Names of the fitted constants."""
    return tuple(name for name, constant in CONSTANTS.items() if constant.how == "fitted")


def with_values(calibration: Calibration = CALIBRATION, /, **values: float) -> Calibration:
    """The calibration with other values of some constants.

    Raises:
        BadInput: for a constant that does not exist, or a value that is not positive.
    """
    known = [field.name for field in fields(calibration)]
    for name, value in values.items():
        if name not in known:
            raise BadInput(f"there is no constant {name!r}; they are {', '.join(known)}")
        if not 0 < value < math.inf:  # NaN too
            raise BadInput(f"{name} is {value}; give a positive number")
    return replace(calibration, **values)


def value_that_meets(
    name: str, seconds: float, predict: Callable[[Calibration], float], others: Mapping[str, float] | None = None
) -> float | None:
    """The value of a constant with which a prediction meets a time, from a twentieth to 20 times its own; else None.

    ``predict`` gives the same time by a calibration, and grows or falls with the constant ``name`` all the way;
    ``others`` are values of other constants.
    """
    from scipy.optimize import brentq  # a projection solves nothing, and does not wait for scipy

    usual = getattr(CALIBRATION, name)  # a constant that was found further off would explain something else
    low, high = usual / 20, usual * 20

    def late_s(value: float) -> float:
        return predict(with_values(**{**(others or {}), name: value})) - seconds

    if not seconds > 0 or late_s(low) * late_s(high) > 0:  # too late at both ends, or too early: none between meets it
        return None
    return float(brentq(late_s, low, high, xtol=1e-9 * high))


def calibration_file(name: str) -> Path:
    """Where a calibration of one's own is: a path, or a name below the user's configuration."""
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    if not re.fullmatch(r"[\w.-]{1,64}", name):
        raise BadInput(f"the calibration's name is {name!r}; use letters, digits, '-', '_' and '.', or a .yaml path")
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return configuration / "moelab" / "calibrations" / f"{name}.yaml"


def write_calibration(name: str, values: Mapping[str, float], source: str) -> Path:
    """Keep constants for :func:`read_calibration`; returns the file."""
    from moelab.files import write_whole  # a projection loads no pandas, which moelab.runs does

    path, content = calibration_file(name), {"source": source, "constants": dict(values)}
    write_whole(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return path


@dataclass(frozen=True)
class _Fitted:
    """Content of such a file."""

    source: str
    constants: dict[str, float]


def read_calibration(name: str) -> Calibration:
    """The constants with those that ``moelab explain --fit`` read off a traced step.

    Raises:
        BadInput: if there is no such calibration, or it has other content.
    """
    path = calibration_file(name)
    try:
        content = TypeAdapter(_Fitted).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError:
        there = ", ".join(sorted(one.stem for one in path.parent.glob("*.yaml"))) or "none"
        raise BadInput(
            f"there is no calibration {name!r} ({path}); there are: {there}; make one with moelab explain TRACE "
            f"--against FILE.yaml --fit {name}"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        faults = error.errors() if isinstance(error, ValidationError) else []
        told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in faults) or error
        raise BadInput(f"{path} is not a calibration that moelab explain --fit wrote: {told}") from None
    return with_values(**content.constants)
