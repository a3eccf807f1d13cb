"""Compiles kernels for a GPU that is not there and asks the CUDA tools in triton's wheel about them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import tempfile
import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from pagedlab.kernels import block_tables, paged_attention, reshape_and_cache, slot_mapping
from pagedlab.kernels.jit import kernel


def compile_for(arch, source, types, constants, num_warps=4, num_stages=2, unaligned=()):
    """``types`` names the non-i32 arguments; pointers and strides are taken as multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    function = kernel(source, "compiled")
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [
        (i,) for i, name in enumerate(names)
        if signature[name].startswith("*") or ("stride" in name and name not in {*unaligned, *constants})
    ]
    return compile(
        ASTSource(
            function, signature, {(names.index(name),): value for name, value in constants.items()},
            {i: [["tt.divisibility", 16]] for i in aligned},
        ),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True},
    )


class Compiled:
    """Stands in for jit.kernel: compiles what a launch would ask of a GPU that is not there, and launches nothing."""

    def __init__(self, monkeypatch, arch):
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        device = SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", arch, 32),
        )  # fmt: skip
        monkeypatch.setattr(driver, "_active", device)
        for module in (block_tables, paged_attention, reshape_and_cache, slot_mapping):
            monkeypatch.setattr(module, "kernel", self)
        self.functions = {}  # name of a kernel -> it, with the variants of this arch alone

    def __call__(self, source, how):
        function = self.functions.setdefault(source.__name__, kernel.__wrapped__(source, "compiled"))
        return Launcher(lambda grid, *args, **meta: function.run(*args, grid=grid, warmup=True, **meta))

    def variants(self, name):
        """Compiled kernels, one per specialisation that was asked for."""
        return list(self.functions[name].device_caches[0][0].values())


class Launcher:
    def __init__(self, launch):
        self.launch = launch

    def __getitem__(self, grid):
        return partial(self.launch, grid)


def resources(compiled):
    """REG, STACK, SHARED and LOCAL of the cubin; a spilled register shows as STACK."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text.stdout + text.stderr))
    usage = {name: int(value) for name, value in found.items()}
    usage["SHARED"] += compiled.metadata.shared  # static, and what the launch asks for
    return usage


def without_logging(source, directory):
    """The kernel from its source with every ``if LOG:`` branch taken out."""

    class DropLogging(ast.NodeTransformer):
        def visit_If(self, node):
            self.generic_visit(node)
            return None if isinstance(node.test, ast.Name) and node.test.id == "LOG" else node

    tree = DropLogging().visit(ast.parse(textwrap.dedent(inspect.getsource(source))))
    text = "import triton.language as tl\n\n\n" + ast.unparse(tree)
    assert "LOG:" not in text.replace("LOG: tl.constexpr", "")
    path = directory / f"{source.__name__}_without_logging.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, source.__name__)


def instructions(compiled):
    """The PTX without what names places in files: comments, line tables, debug sections."""
    code = compiled.asm["ptx"].split(".section")[0]
    lines = (re.sub(r"//.*", "", line).strip() for line in code.splitlines())
    kept = [line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp", "$L__func"))]
    return re.sub(r"\w+_param_(\d+)", r"param_\1", "\n".join(kept))
