"""`foretoken transcribe`: transcribe audio files to text, subtitles or JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Argument, Exit, Option

from foretoken.cli import option
from foretoken.cli.command import command, set_up_logging
from foretoken.errors import ForetokenError, InputError, RefusedError, format_value
from foretoken.media.transcripts import TRANSCRIPT_FORMATS
from foretoken.storage import files


@command
def transcribe(
    loading: option.PairLoadOptions,
    audio: Annotated[
        list[Path], Argument(metavar="FILE...", help="Audio files: WAV, FLAC, OGG or MP3.")
    ],
    target: Annotated[
        str | None, Option(help="Speech model: a folder or hub id.", show_default=False)
    ] = None,
    draft: Annotated[
        str | None, "Draft: a smaller speech model, such as distil-whisper; lookup or none."
    ] = "none",
    language: Annotated[str | None, "Language, such as en. Default: detected."] = None,
    translate: Annotated[bool, "Translate to English."] = False,
    prompt: Annotated[
        str | None,
        "Preceding text, or names that may occur; for a chat model the instruction.",
    ] = None,
    format: Annotated[str, "Output format: text, srt, vtt or json."] = "text",
    output: Annotated[
        Path | None,
        "Folder for one output file per audio file. Existing files are not overwritten, so the "
        "same command resumes.",
    ] = None,
    gamma: option.Gamma = None,
    temperature: option.Temperature = 0.0,
) -> None:
    """Transcribe audio files, with the times of each segment. If the model supports it, --format
    json also has the times of each word."""
    if target is None:
        raise InputError("no model is given; give --target with a folder or hub id")
    if format not in TRANSCRIPT_FORMATS:
        raise InputError(
            f"--format is {format_value(format)}; give one of {', '.join(TRANSCRIPT_FORMATS)}"
        )
    if output is None and len(audio) > 1 and format != "text":
        raise InputError(f"{len(audio)} files cannot be printed as one {format}; give --output")
    if output is not None and output.exists() and not output.is_dir():
        raise InputError(f"--output is {output}, which is not a folder; give a folder")
    suffix = "txt" if format == "text" else format
    outputs = [output / f"{file.stem}.{suffix}" for file in audio] if output else []
    if output is not None:
        _make_folder(output)
    if duplicate := next((place for place in outputs if outputs.count(place) > 1), None):
        raise InputError(f"two audio files have the output file {duplicate}; rename one of them")
    loading.require(target)
    set_up_logging()
    from foretoken.speech import transcription  # late: imports torch

    spec = _choose_audio_runtime(loading, target).load(target, draft)
    options: dict[str, Any] = {"language": language, "translate": translate, "prompt": prompt}
    options |= {"gamma": gamma, "temperature": temperature}
    options["words"] = format == "json" and transcription.can_time_words(spec)
    failed = False
    for i, file in enumerate(audio):
        if outputs and outputs[i].exists():
            print(f"{file}: {outputs[i]} exists already", file=sys.stderr)
            continue
        try:
            with _show_progress(file) as report:
                transcript = transcription.transcribe(spec, file, progress=report, **options)
        except ForetokenError as error:  # continue with the other files
            if len(audio) == 1:
                raise
            failed = True
            print(f"{file}: {error}", file=sys.stderr)
            continue
        text = TRANSCRIPT_FORMATS[format](transcript)
        if not outputs:
            if len(audio) > 1:  # as `head` does
                print(f"==> {file} <==")
            sys.stdout.write(text)
            continue
        files.write_atomically(outputs[i], text.encode())
        print(f"{file}: {transcript.seconds:.0f} s, {outputs[i]}", file=sys.stderr)
    if failed:
        raise Exit(1)


def _choose_audio_runtime(loading: option.PairLoadOptions, target: str) -> option.PairLoadOptions:
    """Return the options. For a target that is not an encoder-decoder, choose the torch backend,
    because the native backend supports audio in encoders only. Raises RefusedError if the dtype
    needs the native backend."""
    if loading.runtime != "auto":
        return loading
    from foretoken.loading.sources import find_source

    if find_source(target, loading.revision, loading.trust_remote_code).config.is_encoder_decoder:
        return loading
    if loading.dtype in ("int8", "int4"):
        problem = (
            f"{target} transcribes audio on the torch backend only, which does not support --dtype "
            f"{loading.dtype}"
        )
        raise RefusedError(f"{problem}; give float32 or bfloat16")
    return replace(loading, runtime="transformers")


def _make_folder(folder: Path) -> None:
    """Create the folder of --output if it does not exist. Raises InputError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"--output is {folder}, which cannot be created ({error.strerror})"
        raise InputError(f"{problem}; give another folder") from None


@contextmanager
def _show_progress(file: Path) -> Generator[Callable[[float], None] | None]:
    """Show a progress bar for a file if standard error is a terminal. Yield a function to call with
    the share of the file that is done, or None if there is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(str(file), total=1.0)
        yield lambda done: bar.update(task, completed=done)
