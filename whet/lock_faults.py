"""What makes an entry of the lock invalid: the fields of every section, their types, and what must hold between them."""

from collections.abc import Callable

from whet.op import Call, discover


def usable(candidate: dict) -> bool:
    """Marked right, timed, and not merely interpreted."""
    return candidate["ok"] and "ms" in candidate and "interpreted" not in candidate


def _are(fields: dict, kinds: dict[str, tuple[type, ...]]) -> str:
    """Empty, or which of these fields has a wrong type; a field may be absent."""
    for name, value in fields.items():
        kind = kinds.get(name)
        if kind is not None and type(value) not in kind:
            return f"its {name} is of type {type(value).__name__}"
    return ""


NUMBER, PERHAPS = (int, float), (int, float, type(None))
CANDIDATE = {"ok": (bool,), "why": (str,), "share": PERHAPS, "ms": NUMBER, "low": NUMBER, "high": NUMBER, "samples": (int,),
             "host_us": PERHAPS, "peak_mib": PERHAPS, "interpreted": (str,), "source": (str,), "screened": NUMBER,
             "took_s": NUMBER}
ENTRY = {"mode": (str,), "count": (int,), "candidates": (dict,), "chosen": (str,), "untimed": (bool,), "why": (str,),
         "ms": NUMBER, "vs_eager": PERHAPS, "rival": (str,), "vs_rival": PERHAPS, "floor_ms": PERHAPS, "bound": (str,)}
SWAP = {"what": (str,), "date": (str,), "replaced": (bool,), "before_ms": PERHAPS, "after_ms": PERHAPS, "why": (str,),
        "impls": (dict,), "sources": (dict,), "share": NUMBER, "batches": (list,), "form": (str,)}
SCALARS = (int, float, str, bool, type(None))


def _call(fields: object) -> Call | None:
    """The call that these fields describe, if they do."""
    if not isinstance(fields, dict) or _are(fields, {"op": (str,), "case": (dict,), "dtype": (str,), "grad": (bool,)}):
        return None
    try:
        call = Call(**fields)
    except TypeError:
        return None
    return call if all(type(v) in SCALARS for v in call.case.values()) else None


def _call_fault(key: str, entry: dict) -> str:
    """Empty, or why an entry of "calls" does not count. One without a choice is a tuning not yet finished."""
    call = _call(entry.get("call"))
    if call is None or "mode" not in entry or "candidates" not in entry:
        return "it is incomplete"
    if fault := _are(entry, ENTRY):
        return fault
    if key != f"{call.key} @ {entry['mode']}":
        return "its key is not its call's"
    candidates = entry["candidates"]
    for name, c in candidates.items():
        if type(c) is not dict or "ok" not in c:
            return f"its candidate {name} is incomplete"
        if fault := _are(c, CANDIDATE):
            return f"of its candidate {name} {fault}"
        if not 0 <= c.get("ms", 0) < 1e12:
            return f"its candidate {name} took {c['ms']} ms"
    if (chosen := entry.get("chosen")) is None:
        return ""
    if entry.get("untimed"):  # nothing could be timed: the stock call, decided once
        op = discover().get(call.op)
        if chosen != op.stock if op else chosen not in ("torch", "eager"):
            return "its choice is untimed and not the stock call"
        return "it is marked untimed, and has a candidate that was timed" if any(map(usable, candidates.values())) else ""
    return "" if chosen in candidates and usable(candidates[chosen]) else "its choice is not verified and timed"


def _plan_fault(key: str, result: dict) -> str:
    calls, plans = result.get("calls"), result.get("plans")
    if type(result.get("config")) is not str or type(calls) is not list or type(plans) is not list:
        return "it is incomplete"
    if not all(type(c) is dict and _call(c.get("call")) for c in calls):
        return "one of its calls is incomplete"
    if not all(type(p) is dict and type(p.get("name")) is str and type(p.get("ok")) is bool for p in plans):
        return "one of its plans is incomplete"
    return ""


def _decoder_fault(key: str, verdict: dict) -> str:
    return _are(verdict, {"ok": (bool,), "why": (str,)}) or ("" if {"ok", "why"} <= verdict.keys() else "it is incomplete")


def _swap_fault(key: str, entry: dict) -> str:
    """Empty, or why a decision of optimize() does not count."""
    if not {"what", "date", "replaced", "before_ms", "after_ms", "why"} <= entry.keys():
        return "it is incomplete"
    if fault := _are(entry, SWAP):
        return fault
    times = [entry[name] for name in ("before_ms", "after_ms") if entry[name] is not None]
    if not all(0 < t < 1e12 for t in times):
        return f"its times are {times} ms"
    if not all(type(v) is str for kept in ("impls", "sources") for v in entry.get(kept, {}).values()):
        return "its impls or their sources are no names"
    return ""


FAULTS: dict[str, Callable[[str, dict], str]] = {
    "calls": _call_fault, "plans": _plan_fault, "decoders": _decoder_fault,
    "swaps": _swap_fault,
}
