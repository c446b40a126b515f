"""C with integers only: close to Keras, without floating point, the same on a Cortex-M."""

import re
import shutil
import subprocess

import numpy as np
import pytest

from tests.export.random_nets import CHANNELS, random_net
from tests.export.test_c import GCC, classifier, compile_c, forecaster, language_model
from trellis_keras.export import export, native
from trellis_keras.export.c import fixed_source, keras_steps, stream_program
from trellis_keras.export.interpreter import interpret
from trellis_keras.layers import MixtureOfSoftmaxes

# A walk, as of a sensor: smooth, with large and small values.
X = np.random.default_rng(0).normal(size=(120, CHANNELS)).cumsum(axis=0).astype("float32") / 4
QUICK = range(4)


def difference(model, x=X):
    """The mean difference from Keras, as a part of the largest output."""
    stream = native(model, representative_data=x)
    expected = keras_steps(model, x)
    found = np.stack([stream.step(row) for row in x])
    return np.mean(np.abs(found - expected)) / np.max(np.abs(expected))


@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 60))]
)
def test_random_nets_are_close_to_keras(seed):
    net = random_net(seed)
    program = stream_program(net, "net")
    exact = interpret(program, X[None], lambda of, value: None)[0]
    np.testing.assert_allclose(exact, keras_steps(net, X), rtol=0, atol=1e-4)
    if any(getattr(operation, "log", False) for operation in program.operations):
        pytest.skip("log-probabilities have no form in integers")
    # Of 60 nets half are below 0.001. A normalization of small numbers amplifies their rounding.
    assert difference(net) < 0.06


def test_models_are_close_to_keras():
    for model in (classifier(), forecaster()):
        model.adapt(X)
        assert difference(model) < 2e-3
    ids = np.random.default_rng(0).integers(0, 9, 200)
    assert difference(language_model(), ids) < 2e-3


def write(folder, **options):
    model = classifier()
    model.adapt(X)
    path = folder / "model.c"
    export(model, path, format="c", quantization="int8", representative_data=X, **options)
    return path.read_text(), path.with_suffix(".h").read_text()


@GCC
def test_the_step_has_no_floating_point(tmp_path):
    code, header = write(tmp_path)
    step = code.split("/* In floating point */")[0]
    assert not re.search(r"float|double|\d\.\d", step)
    assert "int8_t" in code and re.search(r"representative data.*\n.* on average", header)
    (tmp_path / "main.c").write_text(_MAIN)
    (tmp_path / "host.c").write_text(_ON_HOST)
    options = ["-fsanitize=address,undefined", "-fno-sanitize-recover", "-O1"]
    compile_c(tmp_path, *options, files=["model.c", "main.c", "host.c"])
    assert subprocess.run(tmp_path / "a.out").returncode == 0
    for seed in QUICK:
        source = fixed_source(random_net(seed), "net", X)
        (tmp_path / "net.h").write_text(source.header)
        (tmp_path / "net.c").write_text(source.code)
        compile_c(tmp_path, "-c", files=["net.c"])


def test_errors(tmp_path):
    model, options = classifier(), {"format": "c", "quantization": "int8"}
    model.adapt(X)
    for data, message in {
        None: "which needs it",
        (7, 4): r"shape \(steps, 3\) or \(rows, steps, 3\). Received: shape \(1, 7, 4\)",
    }.items():
        data = None if data is None else np.zeros(data)
        with pytest.raises(ValueError, match=message):
            export(model, tmp_path / "model.c", representative_data=data, **options)
    mixture = language_model(MixtureOfSoftmaxes(9, 2))
    ids = np.zeros(9, "int32")
    with pytest.raises(ValueError, match="Log-probabilities have no form in integers"):
        export(mixture, tmp_path / "model.c", representative_data=ids, **options)
    assert not list(tmp_path.iterdir())


_MAIN = """
#include "model.h"

static model_state state;
static const int16_t rows[3][MODEL_INPUTS] = {{3000, -2000, 100}, {-32768, 32767, 0}, {1, 2, 3}};
void put(int value);

int main(void)
{
    int16_t y[MODEL_OUTPUTS];
    model_reset(&state);
    for (int t = 0; t < 100; t++) {
        model_step(&state, rows[t % 3], y);
        for (int k = 0; k < MODEL_OUTPUTS; k++)
            put(y[k]);
    }
    return sizeof state != MODEL_STATE_BYTES;
}
"""
_ON_HOST = '#include <stdio.h>\nvoid put(int value) { printf("%d\\n", value); }\n'
# One region of memory, which the emulator fills; output through semihosting.
_LINKER = """
SECTIONS
{
    . = 0;
    .vectors : { KEEP(*(.vectors)) }
    .text : { *(.text*) *(.rodata*) }
    .data : { *(.data*) }
    .bss : { *(.bss*) *(COMMON) }
}
"""
_ON_CHIP = """
int main(void);
static int call(int number, const void *argument)
{
    register int r0 __asm__("r0") = number;
    register const void *r1 __asm__("r1") = argument;
    __asm__ volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}
void put(int value)
{
    char text[12], *c = text + 11;
    unsigned rest = value < 0 ? -(unsigned)value : (unsigned)value;
    for (*c = 0, *--c = '\\n';; rest /= 10) {
        *--c = (char)('0' + rest % 10);
        if (rest < 10)
            break;
    }
    if (value < 0)
        *--c = '-';
    call(4, c);
}
static volatile unsigned *const systick = (unsigned *)0xe000e010;
static void start(void)
{
    systick[1] = 0xffffff, systick[2] = 0, systick[0] = 5;
    int status = main();
    unsigned exit[2] = {0x20026, (unsigned)status};
    put(0xffffff - (int)systick[2]);
    call(0x20, exit);
}
__attribute__((section(".vectors"), used)) static const void *const vectors[16] = {
    (void *)0x400000, (void *)start};
"""


@GCC
@pytest.mark.slow
@pytest.mark.parametrize(("machine", "cpu"), [("mps2-an385", "m3"), ("mps2-an386", "m4")])
def test_a_cortex_m_computes_what_the_host_computes(tmp_path, machine, cpu):
    if not all(map(shutil.which, ("qemu-system-arm", "arm-none-eabi-gcc"))):
        pytest.skip("needs qemu-system-arm and gcc-arm-none-eabi")
    write(tmp_path)
    for name, text in {
        "main.c": _MAIN,
        "host.c": _ON_HOST,
        "chip.c": _ON_CHIP,
        "chip.ld": _LINKER,
    }.items():
        (tmp_path / name).write_text(text)
    compile_c(tmp_path, files=["model.c", "main.c", "host.c"])
    host = subprocess.run(tmp_path / "a.out", capture_output=True, text=True).stdout.split()
    options = [f"-mcpu=cortex-{cpu}", "-mthumb", "-O2", "-nostartfiles", "-Tchip.ld"]
    options += ["-ffunction-sections", "-Wl,--gc-sections", "-o", "chip.elf"]
    command = ["arm-none-eabi-gcc", "-std=gnu99", *options, "model.c", "main.c", "chip.c", "-lm"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    command = ["qemu-system-arm", "-M", machine, "-icount", "shift=0", "-display", "none"]
    command += ["-semihosting-config", "enable=on,target=native", "-kernel", "chip.elf"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    *chip, ticks = (run.stdout + run.stderr).split()
    assert run.returncode == 0 and chip == host
    # The timer has 25 MHz, an instruction takes the emulator a nanosecond.
    print(f"{cpu}: {int(ticks) * 40 / 100:.0f} instructions a step, output included")
