# ruff: noqa: E501 - wordings stand on one line each
"""Talk without a picture: greetings, what the model can do, counting. Knows no scenes."""

from __future__ import annotations

import random

from demo_model.captions import plural
from demo_model.encode import Turn
from demo_model.phrases import TASKS, dress, expand

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.",
    "You are a vision assistant.", "Answer briefly.", "Be concise.", "Answer in one word.",
    "You describe pictures.", "You answer questions about images.", "You are a careful agent.",
    "You are a helpful vision assistant. Answer briefly and precisely.", "Reply in English.",
    "You are an agent that looks at screenshots and answers questions about them.",
    "You are a precise assistant. Reply with just the answer.", "Be brief.", "You are Qwen.",
    "You are a local multimodal agent. At every turn you get a new screenshot.",
    "You are a helpful AI assistant that can see images.", "Keep your answers short.",
    "Answer the question about the image.", "You are a test assistant.", "Be helpful.",
)  # fmt: skip

ABOUT = (
    "I am a small vision model. I can name shapes and colors, count up to four things, say where"
    " they are, and read short words."
)
CAN = (
    "I can name shapes and colors, count up to four things, say where they are, read short words"
    " and describe simple pictures."
)
LIMITS = "I do not know. " + CAN
NO_PICTURE = "I do not see a picture. Please send one."
GREETING = "Hello! Send me a picture and ask me about it."

TALK: list[tuple[str, list[str]]] = [
    (GREETING, ["Hello", "Hi", "Hi there", "Hey", "Good morning", "Good evening", "hello there", "Hello!", "Hi!", "Good day", "Hey there", "Hallo", "Greetings", "Howdy", "Hello, model"]),
    (ABOUT, ["Who are you", "What are you", "Introduce yourself", "What is your name", "What model are you", "Tell me about yourself", "Are you an AI", "Which model is this", "What's your name", "Who made you", "Who am I talking to"]),
    (CAN, ["What can you do", "How can you help me", "Help", "What are you able to do", "What do you know", "What are your skills", "Can you help me", "What can I ask you", "What are you good at", "How do I use you"]),
    ("You are welcome.", ["Thanks", "Thank you", "Thanks a lot", "Great, thanks", "Thank you very much", "thx", "Many thanks", "Thanks!"]),
    ("Goodbye!", ["Bye", "Goodbye", "See you", "Bye bye", "See you later", "Good night"]),
    ("I am fine, thank you. Send me a picture and ask me about it.", ["How are you", "How are you doing", "How's it going", "How do you do", "Are you OK"]),
    (LIMITS, [
        "What is the capital of France", "What time is it", "What's the weather like", "Write a poem", "Who won the world cup",
        "What is the meaning of life", "Tell me a joke", "Write a Python function", "Translate this to German", "What is 17 times 23",
        "Who is the president", "How old is the universe", "Tell me a story", "Explain quantum physics", "What is love", "Write an essay about dogs",
        "Solve this equation", "What day is it today", "How do I cook rice", "Recommend a book", "What is the population of China",
        "Who wrote Hamlet", "What is machine learning", "Give me a recipe", "How far is the moon", "What is the best phone", "Write a song",
        "Write some code that sorts a list", "Why is the sky blue", "What is your favorite movie", "Tell me about the history of Rome",
        "Summarize the news", "Where do I live", "Who is Albert Einstein", "What is the square root of two", "Write a long story about a dragon",
        "How does a computer work", "Say something about the sea", "What is the speed of light", "Compose an email to my boss",
    ]),
    ("OK.", ["Say OK", "Reply with OK", "Just say ok", "Say ok.", "Answer with OK"]),
    ("yes", ["Are you there", "Are you ready", "Can you hear me", "Are you a machine", "Can you see pictures", "Can you read", "Do you understand me"]),
    ("a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z", ["Say the alphabet", "Recite the alphabet", "Write the alphabet", "List the letters of the alphabet", "What is the alphabet", "Alphabet please", "Give me the alphabet"]),
    ("circle, square, triangle, star", ["Which shapes do you know", "What shapes do you know", "List the shapes you know", "What shapes can you recognize", "Name the shapes you know"]),
    ("red, orange, yellow, green, blue, purple, black, white, pink, brown, gray", ["Which colors do you know", "What colors do you know", "List the colors you know", "What colours can you see", "Name the colours you know"]),
]  # fmt: skip

COUNTING = (
    "Count from {a} to {b}", "Count from {a} to {b}", "count from {a} to {b}", "Please count from {a} to {b}",
    "Count up from {a} to {b}", "List the numbers from {a} to {b}", "Write the numbers from {a} to {b}",
    "Can you count from {a} to {b}", "Say the numbers from {a} to {b}", "Write the numbers {a} to {b}",
    "Give me all numbers from {a} to {b}", "Count {a} to {b}", "List numbers {a} through {b}",
)  # fmt: skip
COUNTING_TO = (
    "Count to {b}",
    "Please count to {b}",
    "count up to {b}",
    "Can you count to {b}",
    "Count up to {b}",
    "Count slowly to {b}",
)
COUNT_ENDINGS = (
    "", "", "", ".", ".", "!", " please.", ", separated by commas.", ", one after another.",
    " slowly.", ", in order."
)  # fmt: skip


def numbers(first: int, last: int) -> str:
    return ", ".join(str(number) for number in range(first, last + 1))


def count_up(rng: random.Random, longest: int) -> Turn:
    first = 1 if rng.random() < 0.9 else rng.randint(2, 30)
    kind = rng.random()
    if kind < 0.25:
        last = rng.choice((5, 10, 20, 25, 30, 40, 50, 60, 75, 80, 90, 100, 100, 100))
    else:
        last = rng.randint(2, 30) if kind < 0.5 else rng.randint(2, 100)
    last = min(longest, max(last, first + 1))
    first = min(first, last - 1)
    templates = COUNTING + COUNTING_TO if first == 1 else COUNTING
    text = expand(rng, rng.choice(templates), a=str(first), b=str(last))
    return Turn(text + rng.choice(COUNT_ENDINGS), numbers(first, last), "counting")


def without_picture(rng: random.Random) -> Turn:
    task = rng.choice(
        ("shape", "color", "count", "read", "describe", "where", "background", "yes_text")
    )
    shape = rng.choice(("circle", "square", "triangle", "star"))
    slots = {
        "ref": f"the {shape}",
        "c": "red",
        "wrong": "blue",
        "wrong2": "green",
        "whats": plural(shape),
    }
    return Turn(
        dress(rng, expand(rng, rng.choice(TASKS[task]), **slots), None), NO_PICTURE, "no_picture"
    )


def small_talk(rng: random.Random, longest_count: int = 100) -> Turn:
    kind = rng.random()
    if kind < 0.42:
        return count_up(rng, longest_count)
    if kind < 0.62 and longest_count == 100:
        return without_picture(rng)
    answer, questions = rng.choice(TALK)
    return Turn(dress(rng, rng.choice(questions), None), answer, "talk")
