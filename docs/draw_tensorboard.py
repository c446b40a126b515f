"""Draws docs/tensorboard.png: what TensorBoard shows of a run, in headless Chromium.

    trellis-keras train trellisnet_char --hidden-units 32 --embedding-dim 32 --epochs 8 \
        --decay-epochs "[4, 5]" --output runs/shown
    python docs/draw_tensorboard.py runs/shown

Needs Playwright (`pip install playwright`) and a Chromium: the one on the PATH, or that of the
environment variable CHROMIUM.
"""

import argparse
import contextlib
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

HERE = pathlib.Path(__file__).parent
WIDTH = 1440  # of the picture
COLOURS = 256
PATIENCE = 300  # seconds until something appears
DRAWING = 20  # seconds until all of it has
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TAGS = "epoch_bpc|learning_rate|gradient_norms?$|level_(01|10)"
# TensorBoard's pages: the window's size, and what must be seen there.
PAGES = {
    f"?smoothing=0&tagFilter={urllib.parse.quote(TAGS)}#timeseries": (
        (1800, 1000),
        ["text=epoch_bpc", "text=epoch_learning_rate", "text=gradient_norms"],
    ),
    "#text": ((1000, 640), ["text=the model writes"]),
    "#graphs": ((1000, 640), ['svg text:has-text("trellis")']),
}


def chromium():
    """Returns the path of a Chromium, or None."""
    return (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    )


@contextlib.contextmanager
def tensorboard(logs):
    """Yields the address of a TensorBoard of a folder of logs."""
    # Without the working directory on Python's path: the logs may be called `tensorboard`.
    command = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", logs.name]
    command += ["--host", "127.0.0.1", "--port", "0"]
    pipe = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=logs.parent, **pipe) as server:
        try:
            for line in server.stderr:
                if found := re.search(r"at (http://\S+)", line):
                    yield found[1]
                    return
            raise RuntimeError("TensorBoard did not start.")
        finally:
            server.terminate()


def photograph(url):
    """Opens each page and waits for what must be seen there; returns the PNGs."""
    from playwright.sync_api import sync_playwright

    pictures = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=OPTIONS)
        for page, ((width, height), wanted) in PAGES.items():
            tab = browser.new_page(viewport={"width": width, "height": height})
            tab.set_default_timeout(1000 * PATIENCE)
            tab.goto(url + page)
            for selector in wanted:
                tab.locator(selector).first.wait_for()
            tab.wait_for_timeout(1000 * DRAWING)
            pictures.append(tab.screenshot())
            tab.close()
        browser.close()
    return pictures


def compose(pictures):
    """Puts the first page above the others, which stand side by side."""
    from PIL import Image

    first, *others = (Image.open(io.BytesIO(png)).convert("RGB") for png in pictures)
    first = _scaled(first, WIDTH)
    others = [_scaled(page, WIDTH // len(others)) for page in others]
    sheet = Image.new("RGB", (WIDTH, first.height + others[0].height), "white")
    sheet.paste(first, (0, 0))
    for i, page in enumerate(others):
        sheet.paste(page, (i * page.width, first.height))
    return sheet.quantize(COLOURS, dither=Image.Dither.NONE)


def _scaled(page, width):
    from PIL import Image

    return page.resize((width, width * page.height // page.width), Image.LANCZOS)


def main(run, output):
    with tensorboard(pathlib.Path(run) / "tensorboard") as url:
        pictures = photograph(url)
    compose(pictures).save(output, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("output", nargs="?", default=HERE / "tensorboard.png")
    main(**vars(parser.parse_args()))
