"""Draws docs/forecast.png and docs/backtest.png, which docs/forecasting.md shows.

    python docs/draw_forecasts.py

Trains the default forecaster on a motorway's traffic, a window every five hours, backtests it, and
prints what the commands print.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
FILE = HERE.parent / "examples" / "data" / "traffic.csv.gz"
ROLES = {
    "target": ["traffic"],
    "past": ["temperature", "clouds"],
    "future": ["hour_sin", "hour_cos", "weekday", "workday"],
    "time": ["time"],
}
COLUMNS = [word for role, names in ROLES.items() for name in names for word in (f"--{role}", name)]
STRIDE = ["--data-options", '{"stride": 5}']


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run, rows = pathlib.Path(folder, "traffic"), pathlib.Path(folder, "backtest.csv")
        command("train", "tcn_forecaster", "--csv", FILE, *COLUMNS, *STRIDE, "--output", run)
        command("backtest", run, FILE, "--output", rows)
        shutil.copyfile(run / "forecast.png", HERE / "forecast.png")
        shutil.copyfile(rows.with_suffix(".png"), HERE / "backtest.png")


def command(*words) -> None:
    """Runs the command line."""
    subprocess.run([sys.executable, "-m", "trellis_keras", *words], check=True)


if __name__ == "__main__":
    main()
