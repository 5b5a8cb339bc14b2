"""Speech to text: with Whisper, with other models window by window, and the times of words."""
