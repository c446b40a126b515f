"""Counts the instructions of integer-only C on an emulated Cortex-M.

Needs `qemu-system-arm` and `gcc-arm-none-eabi`, both in Debian.
"""

import pathlib
import shutil
import subprocess

MACHINES = {"cortex-m3": "mps2-an385", "cortex-m4": "mps2-an386"}

# A single memory region, loaded by the emulator; output through semihosting.
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
_START = """
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


def is_installed() -> bool:
    """Returns whether the compiler and the emulator are installed."""
    return all(map(shutil.which, ("qemu-system-arm", "arm-none-eabi-gcc")))


def run_main(folder: pathlib.Path, cpu: str) -> tuple[list[str], int]:
    """Compiles and runs a folder's `main.c` and `model.c`, which can print with `put(int)`.

    Args:
        folder: Folder of the C files.
        cpu: One of `MACHINES`.

    Returns:
        The printed numbers, and the number of executed instructions.

    Raises:
        RuntimeError: If the code does not compile, or `main` does not return 0.
    """
    (folder / "chip.c").write_text(_START)
    (folder / "chip.ld").write_text(_LINKER)
    options = [f"-mcpu={cpu}", "-mthumb", "-O2", "-nostartfiles", "-Tchip.ld", "-std=gnu99"]
    options += ["-ffunction-sections", "-Wl,--gc-sections", "-o", "chip.elf"]
    _run(["arm-none-eabi-gcc", *options, "model.c", "main.c", "chip.c", "-lm"], folder)
    # The timer runs at 25 MHz, and the emulator executes an instruction per nanosecond.
    emulator = ["qemu-system-arm", "-M", MACHINES[cpu], "-icount", "shift=0", "-display", "none"]
    emulator += ["-semihosting-config", "enable=on,target=native", "-kernel", "chip.elf"]
    *printed, ticks = _run(emulator, folder).split()
    return printed, 40 * int(ticks)


def _run(command, folder):
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if run.returncode != 0:
        raise RuntimeError(f"{command[0]} failed with status {run.returncode}: {run.stderr}")
    return run.stdout + run.stderr
