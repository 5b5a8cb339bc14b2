// Convert images and audio, from files and the microphone, to types that the server supports and to
// the size that models need.

import { el } from "./dom.js";
import { sum } from "./run.js";

const SMALL = 500_000; // maximum bytes of a file that is sent unchanged
const PICTURES = /^image\/(png|jpeg|webp|gif)$/; // types that the server supports
const SIDE = 1568; // maximum pixels of the longer side; a photo as JPEG then has some 500 kB
const SOUNDS = /^audio\/((x-)?(wav|flac)|mpeg|ogg)\b/; // types that the server supports
const RATE = 16_000; // Hz, the usual rate of speech models

/** Return the file to send. Throws if the browser cannot decode it. */
export const READERS = { image: picture, audio: sound };

async function picture(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(image.width, image.height));
  if (scale === 1 && file.size <= SMALL && PICTURES.test(file.type)) return file;
  const size = [image.width, image.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = new OffscreenCanvas(...size);
  const drawing = canvas.getContext("2d");
  Object.assign(drawing, { fillStyle: "white", imageSmoothingQuality: "high" });
  drawing.fillRect(0, 0, ...size); // JPEG has no transparency; the server also uses white
  drawing.drawImage(image, 0, 0, ...size);
  return canvas.convertToBlob({ type: "image/jpeg", quality: 0.9 });
}

async function sound(file) {
  const read = SOUNDS.test(file.type);
  if (read && file.size <= SMALL) return file;
  const context = new OfflineAudioContext(1, 1, RATE); // decoding resamples to its rate
  const made = wav(await context.decodeAudioData(await file.arrayBuffer()));
  return read && file.size <= made.size ? file : made;
}

/** Return 16-bit mono WAV, the mean of all channels. */
function wav(decoded) {
  const channels = [...Array(decoded.numberOfChannels).keys()].map((i) => decoded.getChannelData(i));
  const samples = new Int16Array(decoded.length).map((_, i) => {
    const mean = sum(channels, (channel) => channel[i]) / channels.length;
    return 32767 * Math.max(-1, Math.min(1, mean));
  });
  const two = (...numbers) => new Uint16Array(numbers);
  const four = (...numbers) => new Uint32Array(numbers);
  const format = [four(16), two(1, 1), four(RATE, 2 * RATE), two(2, 16)];
  const { byteLength } = samples;
  const parts = ["RIFF", four(36 + byteLength), "WAVEfmt ", ...format, "data", four(byteLength), samples];
  return new Blob(parts, { type: "audio/wav" });
}

/** Start recording; return `stop`, which ends it, and `file`, a promise of the recording. */
export async function recording() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream);
  const parts = [];
  recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
  const file = new Promise((resolve) => {
    recorder.addEventListener("stop", () => {
      for (const track of stream.getTracks()) track.stop(); // turns the microphone off
      resolve(new File(parts, "Recording"));
    });
  });
  recorder.start();
  return { file, stop: () => recorder.stop() };
}

export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

/** Return an element that shows or plays it. */
export function view({ kind, name, url }) {
  return kind === "image"
    ? el("img", { src: url, alt: name })
    : el("audio", { src: url, controls: true, "aria-label": name });
}

/** Return it as a part of a message. */
export function part({ kind, url }) {
  if (kind === "image") return { type: "image_url", image_url: { url } };
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1) } };
}
