"""Makes Triton's interpreter fit to be a referee: bfloat16 as the hardware has it, user scans by slices.

Left alone it multiplies the bits of bfloat16 as integers, cuts where a GPU rounds, walks user-defined scans
and reductions entry by entry in Python, and lets NumPy warn where a GPU is silent. Here a bfloat16 tensor is
a float32 array whose entries are rounded to bfloat16, to nearest even, whenever a tensor is made.
Works on Triton 3.6.0, 3.7.1 and 3.9.0. Knows Triton's interpreter; knows nothing of the package, save the
name of the module whose import means that a kernel is about to be used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from typing import Any

import numpy as np

FIRST = "constate.kernels.triton.launch"  # every kernel goes through it


class Lazily(MetaPathFinder):
    """Installs the fixes when FIRST is about to be imported, so that other tests never load Triton."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == FIRST:
            sys.meta_path.remove(self)
            install()


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even, still as float32."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, nearest.view(np.float32))


def narrow(x: np.ndarray) -> np.ndarray:
    """The 16 bits that memory holds of entries that are bfloat16 already."""
    return (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def wide(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def install() -> None:
    """Patches the interpreter of this process; Triton must have been told to interpret. Once is enough."""
    from triton import knobs
    from triton.runtime import interpreter

    assert knobs.runtime.interpret, "TRITON_INTERPRET=1 is wanted before Triton is imported"
    _bfloat16(interpreter)
    _slices(interpreter)
    _quiet(interpreter)
    _once(interpreter)


def _bfloat16(interpreter: Any) -> None:
    tl, handle, builder = interpreter.tl, interpreter.TensorHandle, interpreter.InterpreterBuilder
    memory, bf16 = interpreter._interpreter, tl.bfloat16
    plain_dtype, plain_init = interpreter._get_np_dtype, handle.__init__
    plain = {name: getattr(builder, name) for name in ("cast_impl", "create_fp_to_fp", "create_fabs")}
    plain_fits = interpreter._validate_np_data_size
    plain_bitcast, plain_store = builder.create_bitcast, builder.create_masked_store

    def numpy_dtype(dtype: Any) -> np.dtype:
        return np.dtype(np.float32) if _is(dtype) else plain_dtype(dtype)

    def _is(dtype: Any) -> bool:
        # Asked for every tensor: by name, which is much the quickest.
        return not isinstance(dtype, tl.pointer_type) and dtype.scalar.name == bf16.name

    def fits(data: np.ndarray, dtype: Any) -> bool:
        return data.itemsize <= 4 if _is(dtype) else plain_fits(data, dtype)

    def init(self: Any, *args: Any, **named: Any) -> None:
        plain_init(self, *args, **named)
        # Comparisons keep their left operand's dtype, by the interpreter's own habit; their data are bool.
        if _is(self.dtype) and self.data.dtype != np.bool_:
            self.data = rounded(self.data)

    def convert(name: str) -> Callable[..., Any]:
        def converted(self: Any, source: Any, dtype: Any, *more: Any) -> Any:
            if not (_is(source.dtype) or _is(dtype)):
                return plain[name](self, source, dtype, *more)
            return handle(source.data.astype(numpy_dtype(dtype.scalar)), dtype.scalar)

        return converted

    def fabs(self: Any, x: Any) -> Any:
        return handle(np.abs(x.data), x.dtype.scalar) if _is(x.dtype) else plain["create_fabs"](self, x)

    def bitcast(self: Any, x: Any, dtype: Any) -> Any:
        if _is(x.dtype):
            return handle(narrow(x.data).view(plain_dtype(dtype.scalar)), dtype.scalar)
        if _is(dtype):
            return handle(wide(x.data.view(np.uint16)), dtype.scalar)
        return plain_bitcast(self, x, dtype)

    plain_load = builder.create_masked_load

    def load(self: Any, pointers: Any, mask: Any, other: Any, *more: Any) -> Any:
        if not _is(element := pointers.get_element_ty()):
            return plain_load(self, pointers, mask, other, *more)
        rest = np.zeros(pointers.data.shape, np.uint16) if other is None else narrow(other.data)
        bits = memory.load(pointers.data, mask.data, rest, np.dtype(np.uint16))
        return handle(wide(bits), element)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        if not _is(pointers.get_element_ty()):
            return plain_store(self, pointers, value, mask, *more)
        return memory.store(pointers.data, narrow(value.data), mask.data)

    interpreter._get_np_dtype, interpreter._validate_np_data_size = numpy_dtype, fits
    handle.__init__ = init
    builder.cast_impl, builder.create_fp_to_fp = convert("cast_impl"), convert("create_fp_to_fp")
    builder.create_fabs, builder.create_bitcast = fabs, bitcast
    builder.create_masked_load, builder.create_masked_store = load, store
    builder.get_bf16 = lambda self, value: handle(np.array([value], np.float32), bf16)


def _slices(interpreter: Any) -> None:
    """User-defined combining functions called once a place along the axis, on whole slices."""
    tl, handle = interpreter.tl, interpreter.TensorHandle

    def tensor(data: np.ndarray, dtype: Any) -> Any:
        return tl.core.tensor(handle(data, dtype.scalar), tl.block_type(dtype.scalar, list(data.shape)))

    def walk(combine: Any, inputs: Sequence[Any], axis: int) -> list[list[np.ndarray]]:
        """For each input its partial results, one array with a length-1 axis a place."""
        columns = [np.split(x.handle.data, x.handle.data.shape[axis], axis) for x in inputs]
        kinds, carried = [x.dtype for x in inputs], [column[0] for column in columns]
        partial = [[x] for x in carried]
        for place in zip(*(column[1:] for column in columns), strict=True):
            given = [*zip(carried, kinds, strict=True), *zip(place, kinds, strict=True)]
            made = combine.fn(*(tensor(x, kind) for x, kind in given))
            made = made if isinstance(made, tuple) else (made,)
            carried = [x.handle.data.astype(old.dtype) for x, old in zip(made, carried, strict=True)]
            for kept, x in zip(partial, carried, strict=True):
                kept.append(x)
        return partial

    def scan(self: Any, inputs: Sequence[Any]) -> list[Any]:
        partial = walk(self.combine_fn, inputs, self.axis)
        return [
            self.to_tensor(np.concatenate(kept, self.axis), x.dtype)
            for kept, x in zip(partial, inputs, strict=True)
        ]

    def reduce(self: Any, inputs: Sequence[Any]) -> list[Any]:
        dims = inputs[0].handle.data.ndim
        flat, axis = self.unravel(inputs, self.axis)
        ends = [kept[-1] for kept in walk(self.combine_fn, flat, axis)]
        if self.keep_dims:
            ends = [x.reshape((1,) * dims) if self.axis is None else x for x in ends]
        else:
            ends = [np.squeeze(x, axis) for x in ends]
        ends = [x if x.ndim else x.item() for x in ends]
        return [self.to_tensor(x, old.dtype) for x, old in zip(ends, inputs, strict=True)]

    interpreter.ScanOps.generic_scan, interpreter.ReduceOps.generic_reduce = scan, reduce


def _quiet(interpreter: Any) -> None:
    """No warnings of overflow, which GPUs do not give; an array of one entry is an index, whatever NumPy."""
    plain_call, plain_patch = interpreter.GridExecutor.__call__, interpreter._patch_lang_tensor

    def call(self: Any, *args: Any, **named: Any) -> Any:
        with np.errstate(all="ignore"):
            return plain_call(self, *args, **named)

    def patch(tensor: Any, *more: Any) -> None:
        plain_patch(tensor, *more)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter.GridExecutor.__call__ = call
    interpreter._patch_lang_tensor = patch


def _once(interpreter: Any) -> None:
    """Patches the language, and its core that Triton's own device functions use, once a launch, not again in
    every call of a device function, which took a third of the time."""
    plain_call, plain_patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    languages, patched = (interpreter.tl, interpreter.tl.core), set[int]()

    def call(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return plain_call(self, *args, **named)
        finally:
            patched.clear()

    def patch(fn: Any) -> Any:
        found = {id(value) for value in fn.__globals__.values() if any(value is one for one in languages)}
        if found <= patched:
            return interpreter._LangPatchScope()
        patched.update(found)
        return plain_patch(fn)

    interpreter.GridExecutor.__call__ = call
    interpreter._patch_lang = patch
