"""The few names of `typing` that modules need while they run, for every module that `nodeagent check` imports.

A node report imports some fifty modules with a hundred NamedTuples before it prints its first line. Importing typing
(with re and contextlib behind it), compiling source text and checking annotations for each NamedTuple, were a third
of the CPU time of a whole report: 54 ms with typing, 38 ms with this, where `python -c pass` takes 9.6
(benchmarks/check_start.py, 110 pods).

* Type checkers see typing's own names: nothing here weakens a check.
* While running, `Final`, `Any` and `Protocol` only have to exist. `Annotated` keeps what it was given, for `unwrapped`.
* `NamedTuple` makes classes that behave as typing's do in every way this project uses; tests/unit/test_lean.py compares
  them. There is one constructor for each number of fields, which is then only given the fields' names.

Modules that no report imports use typing itself.
"""

__all__ = ["TYPE_CHECKING", "Annotated", "Any", "Final", "NamedTuple", "Protocol", "unwrapped"]

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Annotated, Any, Final, NamedTuple, Protocol
else:
    from _collections import _tuplegetter  # what collections.namedtuple itself reads fields with
    from functools import cache

    class _Silent:
        def __class_getitem__(cls, parameters):
            return cls

    class Any(_Silent):
        """As in typing, for annotations."""

    class Final(_Silent):
        """As in typing, for annotations."""

    class Protocol(_Silent):
        """As in typing, for annotations: a base class that does nothing."""

    class Annotated:
        """A type with what was said about it."""

        __slots__ = ("bounds", "type")

        def __init__(self, type_, bounds):
            self.type, self.bounds = type_, bounds

        def __class_getitem__(cls, parameters):
            return cls(parameters[0], parameters[1:])

    _new = tuple.__new__

    # A constructor for each number of fields, compiled with this module: compiling one takes 0.05 ms or more, every
    # time. A record with still more fields has to wait for that.
    # fmt: off
    _CONSTRUCTORS = (
        lambda _: _new(_, ()),
        lambda _,a: _new(_,(a,)),
        lambda _,a,b: _new(_,(a,b)),
        lambda _,a,b,c: _new(_,(a,b,c)),
        lambda _,a,b,c,d: _new(_,(a,b,c,d)),
        lambda _,a,b,c,d,e: _new(_,(a,b,c,d,e)),
        lambda _,a,b,c,d,e,f: _new(_,(a,b,c,d,e,f)),
        lambda _,a,b,c,d,e,f,g: _new(_,(a,b,c,d,e,f,g)),
        lambda _,a,b,c,d,e,f,g,h: _new(_,(a,b,c,d,e,f,g,h)),
        lambda _,a,b,c,d,e,f,g,h,i: _new(_,(a,b,c,d,e,f,g,h,i)),
        lambda _,a,b,c,d,e,f,g,h,i,j: _new(_,(a,b,c,d,e,f,g,h,i,j)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k: _new(_,(a,b,c,d,e,f,g,h,i,j,k)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k,m: _new(_,(a,b,c,d,e,f,g,h,i,j,k,m)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k,m,n: _new(_,(a,b,c,d,e,f,g,h,i,j,k,m,n)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k,m,n,o: _new(_,(a,b,c,d,e,f,g,h,i,j,k,m,n,o)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k,m,n,o,p: _new(_,(a,b,c,d,e,f,g,h,i,j,k,m,n,o,p)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q: _new(_,(a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r: _new(_,(a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r,s: _new(_,(a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r,s)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r,s,t: _new(_,(a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r,s,t)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r,s,t,u: _new(_,(a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r,s,t,u)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r,s,t,u,v: _new(_,(a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r,s,t,u,v)),
        lambda _,a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r,s,t,u,v,w: _new(_,(a,b,c,d,e,f,g,h,i,j,k,m,n,o,p,q,r,s,t,u,v,w)),
    )
    # fmt: on

    @cache
    def _constructor(count):
        """A function that makes a tuple of its `count` arguments."""
        if count < len(_CONSTRUCTORS):
            return _CONSTRUCTORS[count]
        names = "".join([f"a{number}, " for number in range(count)])
        return eval(f"lambda _cls, {names}: _new(_cls, ({names}))", {"_new": _new})  # noqa: S307 - our own text only

    @cache
    def _getters(count):
        """What reads the first, the second and so on of so many fields; the same for every record."""
        return [_tuplegetter(number, "") for number in range(count)]

    class _Fields(tuple):
        """What all records can do."""

        __slots__ = ()

        @classmethod
        def _make(cls, values):
            made = _new(cls, values)
            if len(made) != len(cls._fields):
                raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
            return made

        def _replace(self, /, **changes):
            made = _new(type(self), map(changes.pop, self._fields, self))
            if changes:
                raise ValueError(f"Got unexpected field names: {list(changes)!r}")
            return made

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self):
            values = ", ".join([f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True)])
            return f"{type(self).__name__}({values})"

        def __getnewargs__(self):
            return tuple(self)

    class _Maker(type):
        """Makes a record of a class statement whose base is `NamedTuple`."""

        def __new__(mcs, name, bases, body):  # noqa: ARG004 - a metaclass is handed them
            fields = tuple(body.get("__annotations__", ()))
            defaults = {field: body.pop(field) for field in fields if field in body}
            if tuple(defaults) != fields[len(fields) - len(defaults) :]:
                raise TypeError(f"{name}: a field without a default follows fields with one")
            template = _constructor(len(fields))
            code = template.__code__.replace(co_varnames=("_cls", *fields), co_name="__new__")
            body["__new__"] = type(template)(code, template.__globals__, "__new__", tuple(defaults.values()))
            body.update(zip(fields, _getters(len(fields)), strict=True))
            body |= {"__slots__": (), "__match_args__": fields, "_fields": fields, "_field_defaults": defaults}
            return type(name, (_Fields,), body)

    NamedTuple = type.__new__(_Maker, "NamedTuple", (), {})


def unwrapped(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type in `Annotated[type, ...]` and what was said about it; any other annotation, and nothing."""
    bounds = getattr(annotation, "bounds", None)
    return (annotation, ()) if bounds is None else (annotation.type, bounds)
