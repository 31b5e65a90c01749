"""Pickles that would run something: which name, how it is spelled, where the call hides."""

from __future__ import annotations

import marshal

from hostile.blocks import (
    BUILD,
    COMMAND,
    HOOKS,
    MARK,
    MEMOIZE,
    NEWOBJ,
    POP,
    SOURCE,
    STACK_GLOBAL,
    W,
    before,
    call,
    dictionary,
    looked_up,
    name,
    net,
    old,
    op,
    ordered,
    stream,
    tensor,
    tup,
)  # fmt: skip
from hostile.cases import CODE, CODE_OTHER, INVALID, Case

SYSTEM = name("os", "system")
EXPRESSION = "__import__('os').system('touch \"$MARKER\"')"


def popped(gadget: bytes, protocol: int = 2):
    return lambda: net(before(gadget, protocol))


def valued(gadget: bytes):
    return lambda: net(stream(ordered(("w", W), ("x", gadget))))


def compiled() -> bytes:
    """Code of the Python that runs these tests, made a function and called."""
    code = marshal.dumps(compile(SOURCE, "payload", "exec"))
    data = b"B" + len(code).to_bytes(4, "little") + code
    loaded = call("marshal.loads", data)
    made = call("types.FunctionType", loaded, call("builtins.globals"))
    return net(before(made + tup() + b"R", 3))


def inner() -> bytes:
    """A whole checkpoint as bytes in a pickle, for a second torch.load without restrictions."""
    hidden = old(magic=stream(call("os.system", COMMAND) + POP + op(0x1950A86A20F9469CFC6C)))
    data = b"B" + len(hidden).to_bytes(4, "little") + hidden
    return net(before(call("torch.storage._load_from_bytes", data), 3))


def joined(*letters: str) -> bytes:
    """A string that only exists once str.join ran."""
    return looked_up("builtins", "str.join") + tup("", [*letters]) + b"R"


def put(text: str, slot: int, between: bytes = b"") -> bytes:
    return op(text) + between + b"q" + bytes([slot]) + POP


TAKEN = b"h\x00h\x01" + STACK_GLOBAL + tup(COMMAND) + b"R"
REBUILD = name("torch._utils", "_rebuild_tensor_v2")
DISGUISED = (
    REBUILD + tup(None, dictionary(("a", "os"), ("b", "system"))) + BUILD + POP
    + name("torch._utils", "_rebuild_tensor_v2.a") + b"q\x00" + POP
    + name("torch._utils", "_rebuild_tensor_v2.b") + b"q\x01" + POP + TAKEN
)  # fmt: skip

NAMED = (
    ("os-system", "os.system", "os.system", (COMMAND,)),
    ("posix-system", "the name pickle itself writes for os.system", "posix.system", (COMMAND,)),
    ("builtins-exec", "Python source to exec", "builtins.exec", (SOURCE,)),
    ("py2-eval", "a name of Python 2 that loaders translate", "__builtin__.eval", (SOURCE,)),
    ("timeit", "source through timeit", "timeit.timeit", ("pass", SOURCE)),
    ("cprofile", "source through a profiler", "cProfile.run", (SOURCE,)),
    ("runpy", "source through runpy", "runpy._run_code", (SOURCE, b"}")),
    ("numpy-runstring", "source through numpy's own tests",
     "numpy.testing._private.utils.runstring", (SOURCE, b"}")),
    ("jit-exec", "source through a helper of torch.jit",
     "torch.jit.unsupported_tensor_ops.execWrapper", (SOURCE, b"}", b"}")),
    ("collect-env", "a shell command through torch.utils", "torch.utils.collect_env.run", (COMMAND,)),
    ("osx-support", "a shell command through a helper for another system",
     "_osx_support._read_output", (COMMAND,)),
    ("pip-main", "pip, which can install what it likes", "pip.main", (["--version"],)),
    ("popen", "a process as soon as the class is built", "subprocess.Popen", (["true"],)),
    ("torch-load", "another file, loaded without restrictions", "torch.load", ("evil.pth",)),
    ("hub-load", "a repository from the network", "torch.hub.load", ("a/b", "c")),
)  # fmt: skip

CASES = (
    *(Case(row[0], row[1], CODE, popped(call(row[2], *row[3]))) for row in NAMED),
    Case("value", "a call whose result is a value beside the weights", CODE_OTHER,
         valued(call("subprocess.getoutput", COMMAND))),
    Case("key", "a call whose result is a key", CODE_OTHER,
         lambda: net(stream(dictionary((call("os.system", COMMAND), 1), ("w", W))))),
    Case("hook", "a function only named, to be called at backward()", CODE_OTHER,
         valued(tensor(hooks=ordered((0, SYSTEM))))),
    Case("callback", "a function only named, as a value", CODE_OTHER, valued(SYSTEM)),
    Case("stack-global", "the name taken from the stack (protocol 4)", CODE,
         popped(looked_up("os", "system") + tup(COMMAND) + b"R", 4)),
    Case("dotted-stdlib", "a harmless module with a dotted name that leaves it", CODE,
         popped(looked_up("pathlib", "os.system") + tup(COMMAND) + b"R", 4)),
    Case("dotted-torch", "the same below a module of torch", CODE,
         popped(looked_up("torch.serialization", "os.system") + tup(COMMAND) + b"R", 4)),
    Case("resolve-name", "a function fetched by its name, then called", CODE,
         popped(call("pkgutil.resolve_name", "os:system") + tup(COMMAND) + b"R")),
    Case("locate", "the same through pydoc", CODE,
         popped(call("pydoc.locate", "os.system") + tup(COMMAND) + b"R")),
    Case("partial", "functools.partial of os.system, called", CODE,
         popped(call("functools.partial", SYSTEM, COMMAND) + tup() + b"R")),
    Case("partial-state", "a harmless partial whose function BUILD replaces", CODE,
         popped(call("functools.partial", name("builtins", "print"))
                + tup(SYSTEM, (COMMAND,), b"}", None) + BUILD + tup() + b"R")),
    Case("map", "os.system never called by REDUCE but by deque(map(…))", CODE,
         popped(call("collections.deque", call("builtins.map", SYSTEM, [COMMAND])))),
    Case("spawn", "a process by a helper of multiprocessing", CODE,
         popped(call("multiprocessing.util.spawnv_passfds", b"C\x07/bin/sh",
                     [b"C\x02sh", b"C\x02-c", b"C\x0e" + COMMAND.encode()[:14]], ()), 3)),
    Case("compiled", "marshalled code made a function: no name that block lists know", CODE, compiled),
    Case("inner", "bytes in the pickle that torch loads again, without restrictions", CODE, inner),
    Case("inst", "INST of protocol 0", CODE, popped(MARK + op(COMMAND) + b"ios\nsystem\n")),
    Case("obj", "OBJ, popped at once: some readers forget the call", CODE,
         popped(MARK + name("subprocess", "Popen") + op(["sh", "-c", COMMAND]) + b"o")),
    Case("inst-stranger", "a function of a module we have not got, by INST: it is called", CODE_OTHER,
         valued(MARK + b"ihostile_canary\nmain\n")),
    Case("dependency", "an item of a sympy matrix, which is evaluated: torch requires sympy",
         CODE_OTHER, valued(name("sympy.matrices.dense", "MutableDenseMatrix") + NEWOBJ
                            + tup(*[call("builtins.slice", 0, 1)] * 2) + op([EXPRESSION]) + b"s")),
    Case("newobj-ex", "NEWOBJ_EX of a class that runs on construction", CODE,
         popped(name("subprocess", "Popen") + tup(["true"]) + b"}\x92", 4)),
    Case("extension", "a number registered for os.system, then EXT1: no name in the opcodes", INVALID,
         popped(call("copyreg.add_extension", "os", "system", 77) + POP
                + b"\x82\x4d" + tup(COMMAND) + b"R")),
    Case("computed", "module and name made by str.join", CODE,
         popped(joined("o", "s") + joined("sys", "tem") + STACK_GLOBAL + tup(COMMAND) + b"R", 4)),
    Case("attribute", "names hidden as attributes of an allowed function", CODE,
         popped(DISGUISED, 4)),
    Case("memo-mix", "MEMOIZE and BINPUT mixed: a reader of one sees other names", CODE,
         popped(put("os", 0) + put("system", 1) + op("torch._utils") + MEMOIZE + POP
                + op("_rebuild_tensor_v2") + MEMOIZE + POP + TAKEN, 4)),
    Case("memo-mark", "MARK POP between a string and its memo slot", CODE,
         popped(put("os", 0, MARK + POP) + put("system", 1, MARK + POP) + TAKEN, 4)),
    Case("escaped", "escapes in STRING and UNICODE spell the names", CODE,
         popped(b"S'\\157s'\nVsyste\\u006d\n" + STACK_GLOBAL + tup(COMMAND) + b"R", 4)),
    Case("storage-name", "a function whose name ends like a storage type", CODE,
         popped(call("os.systemStorage", COMMAND))),
    Case("codec", "text decoded by a codec that the file names, which is imported", CODE_OTHER,
         valued(call("_codecs.encode", "x", "hostile_canary"))),
    Case("canary-class", "a class of a module that does not exist, built with arguments", CODE_OTHER,
         valued(call("hostile_canary.Thing", 1))),
    Case("then-invalid", "the payload first, then an invalid opcode", INVALID,
         lambda: net(b"\x80\x02" + call("os.system", COMMAND) + b"\xff\xff")),
    Case("then-end", "the payload first, then no STOP", INVALID,
         lambda: net(b"\x80\x02" + call("os.system", COMMAND))),
    Case("straddle", "a frame that ends inside an opcode: two readers read two programs", INVALID,
         lambda: net(straddle())),
    Case("many-names", "50,000 functions: the answer stays short", CODE_OTHER,
         valued(op([name(f"mod{i}", f"f{i}") for i in range(50_000)])), seconds=4),
)  # fmt: skip


def straddle() -> bytes:
    hidden = SYSTEM + op(COMMAND) + b"\x85R"
    inside = (hidden + MARK).ljust(256 + 5, b"N")
    frame = b"\x95" + (2).to_bytes(8, "little")
    return b"\x80\x05" + MARK + frame + b"B\x07\x01\0\0\0\0" + inside + b"1" + HOOKS + b"."
