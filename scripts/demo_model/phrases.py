# ruff: noqa: E501 - wordings stand on one line each
"""How people ask. Templates with `[a|b]` choices, `{name}` slots, and manners added at random.

Knows wording; knows nothing of scenes.
"""

from __future__ import annotations

import random
import re

CHOICE = re.compile(r"\[([^\[\]]*)\]")

MACROS = {
    "pic": "[picture|picture|image|image|photo|screenshot|drawing]",
    "thispic": "[the {pic}|this {pic}|the {pic}|this]",
    "color": "[color|colour]",
    "inpic": "[| in the {pic}| in the {pic}| in this {pic}| here| in this one]",
    "shown": "[shown|drawn|visible|displayed|depicted|pictured]",
    "thing": "[shape|object|figure|thing]",
    "things": "[shapes|objects|figures|things]",
    "center": "[middle|center|centre]",
    "see": "[see|you see|do you see|can you see|can you see]",
}

TASKS: dict[str, list[str]] = {
    "shape": [
        "[What|Which] {thing} is [|{shown} ]in {thispic}", "[What|Which] shape is this",
        "[What|Which] shape is it", "[What|Which] shape [do|can] you see{inpic}",
        "Name the {thing}{inpic}", "What is [in|{shown} in] {thispic}", "Identify the shape{inpic}",
        "What is the [shape|name of the shape|shape of the object]{inpic}",
        "What kind of [shape|figure] is [this|it|{shown}|in {thispic}]", "What [do|can] you see{inpic}",
        "Tell me [what|which] shape [this|it] is", "What's the shape", "What's this shape",
        "What [type|sort] of shape does {thispic} [show|contain|have]", "What is this",
        "Which of these is it: circle, square, triangle or star",
        "Is [this|it|the {thing}] a circle, a square, a triangle[,|] or a star",
        "[What|Which] geometric [shape|figure] is {shown}{inpic}", "What does {thispic} [show|contain]",
        "[Look at the {pic}|Here is {a_pic}]. [What|Which] shape is it", "shape",
        "There is one {thing}{inpic}. What is it", "Please name the shape you see",
        "[Classify|Recognize|Recognise] the shape", "What shape does {thispic} show",
        "What is the main [shape|object]{inpic}", "Can you tell me what shape this is",
        "What kind of shape did I draw", "What did I draw", "What have I drawn{inpic}", "Which figure did [I|someone|they] draw", "Guess the shape",
        "[Circle|Square|Triangle|Star] or [circle|square|triangle|star]", "What would you call this [shape|figure]", "What's [in|on] {thispic}",
    ],
    "shape_of": [
        "[What|Which] shape is {ref}", "What is {ref}", "What kind of shape is {ref}",
        "Tell me the shape of {ref}", "What shape does {ref} have", "Name {ref}",
        "[What|Which] shape is {ref}{inpic}", "Identify {ref}", "{ref}: what shape is it",
        "What is the shape of {ref}", "Look at {ref}. What shape is it",
    ],
    "shape_by_color": [
        "[What|Which] {thing} is {c}", "[What|Which] [shape|object] is {c}{inpic}", "What is {c}{inpic}",
        "Which one is {c}", "[What|Which] of the {things} is {c}", "What is the {c} [one|{thing}]",
        "[What|Which] shape has the {color} {c}", "What {c} shape [do you see|is there|is {shown}]",
    ],
    "shape_by_place": [
        "[What|Which] {thing} is {at}", "[What|Which] shape is {at}{inpic}", "What is {at}",
        "[What|Which] shape do you see {at}", "What can you see {at}", "Name the shape {at}",
        "What's {at}", "[What|Which] object is [located|placed|found] {at}",
    ],
    "color": [
        "[What|Which] {color} is {ref}", "[What|Which] {color} is {ref}{inpic}",
        "What is the {color} of {ref}", "What's the {color} of {ref}{inpic}", "Name the {color} of {ref}",
        "Tell me the {color} of {ref}", "[What|Which] {color} does {ref} have",
        "{ref} is [what|which] {color}", "What is {ref}'s {color}", "In [what|which] {color} is {ref} drawn",
        "Can you tell me [what|which] {color} {ref} is", "Identify the {color} of {ref}",
        "How would you describe the {color} of {ref}", "What {color} has {ref} been [painted|drawn|filled] with",
        "[Look at|See] {ref}. What {color} is it", "I need the {color} of {ref}", "{color} of {ref}",
        "Is {ref} {c}, {wrong} or {wrong2}", "Is {ref} {wrong} or {c}", "Is {ref} {c} or {wrong}",
        "What {color} did I use for {ref}", "What hue is {ref}", "Which paint was used for {ref}", "{ref}: {color}", "What is {ref} colored",
    ],
    "background": [
        "[What|Which] {color} is the background", "What is the {color} of the background",
        "What's the background {color}", "Name the background {color}", "background {color}",
        "[What|Which] {color} is the background [of|in] {thispic}", "What {color} is behind the [shape|shapes|text|object]",
        "On [what|which] {color} background is it drawn", "Tell me the {color} of the background",
    ],
    "count": [
        "How many {whats} are [there|there{inpic}|{shown}|in {thispic}|{shown} in {thispic}|visible]",
        "How many {whats} [do|can] you see{inpic}", "Count the {whats}", "Count the {whats}{inpic}",
        "How many {whats}", "What is the number of {whats}{inpic}", "What number of {whats} [do you see|are there]",
        "Tell me how many {whats} there are", "How many {whats} does {thispic} [show|contain|have]",
        "Please count [the|all the|all] {whats}", "Can you count the {whats}{inpic}", "number of {whats}",
        "How many {whats} {see}{inpic}", "Give me the number of {whats}", "Count how many {whats} there are",
        "What's the [count|total number] of {whats}", "How many {whats} are there in total",
        "I want to know how many {whats} are in {thispic}", "How many {whats} appear in {thispic}",
        "Please count every one of the {whats}", "How many {whats} can be [seen|found|spotted]{inpic}", "What is the total of {whats}", "Count them: how many {whats}",
    ],
    "where": [
        "Where is {ref}", "Where is {ref}{inpic}", "Where [do|can] you see {ref}", "Where's {ref}",
        "Where in {thispic} is {ref}", "In which part of {thispic} is {ref}", "What is the position of {ref}",
        "Where is {ref} [located|placed|positioned]", "Tell me where {ref} is", "Locate {ref}",
        "On [what|which] side [of {thispic} |]is {ref}", "Describe the position of {ref}",
        "What is the location of {ref}{inpic}", "Where can I find {ref}", "Where does {ref} appear{inpic}",
        "[What|Which] part of the {pic} [contains|holds|has] {ref}", "Find {ref}. Where is it",
        "Where is {ref}: left, right, top, bottom[,|] or middle", "position of {ref}",
        "Can you tell me where {ref} is", "What area of the {pic} is {ref} in",
        "In what part of {thispic} can {ref} be found", "Where can {ref} be [found|seen]", "In which [corner, side or part|part|area|region] of {thispic} [is|do you see] {ref}", "Whereabouts is {ref}", "Which [area|region|part] of {thispic} is {ref} [in|at]", "Where did I [put|draw|place] {ref}",
    ],
    "where_lr": [
        "Is {ref} on the left or [on |]the right", "Is {ref} on the left or right [side|side of the {pic}|half]",
        "Left or right: where is {ref}", "Is {ref} left or right", "On which side is {ref}, left or right",
        "Is {ref} on the right or on the left", "Where is {ref}, left or right",
        "Which side is {ref} on: left or right", "Is {ref} in the left or [in |]the right half",
    ],
    "where_tb": [
        "Is {ref} at the top or [at |]the bottom", "Is {ref} in the top or bottom [half|part]",
        "Top or bottom: where is {ref}", "Is {ref} at the bottom or [at |]the top",
        "Where is {ref}, top or bottom", "Is {ref} near the top or near the bottom",
    ],
    "bigger": [
        "[What|Which] [shape|object|one] is [bigger|larger]", "[What|Which] is the [biggest|largest] {thing}",
        "Which of the [two|shapes] is [bigger|larger]", "What is the [biggest|largest] [shape|object]{inpic}",
        "Which {thing} is the [biggest|largest]",
    ],
    "smaller": [
        "[What|Which] [shape|object|one] is smaller", "[What|Which] is the smallest {thing}",
        "Which of the [two|shapes] is smaller", "Which {thing} is the smallest",
    ],
    "read": [
        "[What|Which] [word|text] is [|{shown} |written ]in {thispic}", "What does {thispic} say", "What does it say",
        "Read the [text|word|text{inpic}|word{inpic}]", "What is written [here|in {thispic}|there]", "What text [do|can] you see{inpic}",
        "What is the [text|word]{inpic}", "Transcribe the text", "Transcribe the text{inpic}", "Read it", "What does the text say",
        "What word [do you see|is this|is it|is {shown}|is written]{inpic}", "Read {thispic}", "Read the [word|text] [out |aloud |]to me",
        "What is the word", "What's written [here|in {thispic}|on it]", "What's the text", "Please read [it|the text|this|the word]",
        "Can you read [it|this|the text|the word|the text{inpic}]", "What does the [sign|label|button|caption|word] say", "Extract the text",
        "What characters are {shown}{inpic}", "Write down [the text|what you read|what is written]{inpic}", "text",
        "OCR", "Copy the text{inpic}", "Which letters [do you see|are {shown}|can you read]", "Tell me what the [text|word] says",
        "Give me the text{inpic}", "What can you read{inpic}", "What [text|word] does {thispic} contain", "What does this say",
        "Spell out what is written{inpic}", "Read all the text{inpic}", "Read everything{inpic}", "What is the [exact |]text{inpic}",
        "Can you tell me what is printed{inpic}", "What is it saying", "What text is written here", "What is printed [here|on it|in {thispic}]", "What do the letters say", "Read me the word", "What stands there",
    ],
    "read_number": [
        "What number is [|{shown} |written ]in {thispic}", "[What|Which] number [do|can] you see{inpic}", "Read the number{inpic}",
        "What is the number{inpic}", "What number is it", "What number is this", "What's the number", "Which digits do you see",
        "Read the digits", "Tell me the number", "What [value|number] is {shown}", "Which number is written{inpic}",
        "What is the [value|number] {shown}", "number",
        "Which number is printed{inpic}", "What do the digits say", "Tell me which number you see",
    ],
    "read_line": [
        "What does the {nth} line say", "Read the {nth} line", "What is [written |]on the {nth} line",
        "What is the {nth} line", "[What|Which] text is on the {nth} line", "Read only the {nth} line", "Read line {n}",
        "What does line {n} say", "What is written [in|on] line {n}",
    ],
    "read_at": [
        "What does the text {at} say", "Read the [text|word] {at}", "[What|Which] [word|text] is {at}", "What is written {at}",
    ],
    "read_color": [
        "What does the {c} [text|word] say", "Read the {c} [text|word]", "[What|Which] word is [|written in |in ]{c}",
        "What is [written|the text] in {c}",
    ],
    "describe": [
        "Describe {thispic}", "Describe the {pic} in one sentence", "What do you see? Describe it in [a|one] sentence",
        "Describe what you see", "Describe what is in the {pic}", "Give [me |]a [short |brief |one-sentence |]description[| of {thispic}]",
        "Describe the {pic} briefly", "Write a caption for {thispic}", "Caption {thispic}", "Describe this scene",
        "What is in {thispic}? Describe it", "Summarize {thispic} in one sentence", "In one sentence, what does {thispic} show",
        "Tell me about {thispic}", "Explain what you see in {thispic}", "Describe everything{inpic}",
        "What is going on in {thispic}", "What does the scene look like", "Put {thispic} into words",
    ],
    "yes_exists": [
        "Is there {a_what}{inpic}", "Is there {a_what}", "Do you see {a_what}{inpic}", "Can you see {a_what}",
        "Does {thispic} [show|contain|have] {a_what}", "Is {a_what} [|{shown} ]in {thispic}", "Are there any {whats}{inpic}",
        "Do you see any {whats}", "Is {a_what} present{inpic}", "Can you find {a_what}{inpic}",
        "Does {a_what} appear in {thispic}",
        "Can you spot {a_what} anywhere", "Is {a_what} anywhere{inpic}", "Is {a_what} to be seen{inpic}", "Did I draw {a_what}", "Would you find {a_what}{inpic}",
    ],
    "yes_color": [
        "Is {ref} {c}", "Is {ref} {c}{inpic}", "Is the {color} of {ref} {c}", "Does {ref} have the {color} {c}",
        "Would you say {ref} is {c}",
    ],
    "yes_shape": ["Is {ref} {a_what}", "Is {ref} {a_what}{inpic}", "Would you say {ref} is {a_what}", "Does {ref} look like {a_what}"],
    "yes_where": ["Is {ref} {at}", "Is {ref} {at} of the {pic}", "Is {ref} [located|placed] {at}", "Can {ref} be found {at}"],
    "yes_count": [
        "Are there {n} {whats}{inpic}", "Do you see {n} {whats}", "Are there exactly {n} {whats}{inpic}",
        "Does {thispic} [show|contain] {n} {whats}", "Is the number of {whats} {n}",
    ],
    "yes_left": ["Is {ref} [to the |]left of {other}", "Is {ref} on the left of {other}"],
    "yes_right": ["Is {ref} [to the |]right of {other}", "Is {ref} on the right of {other}"],
    "yes_above": ["Is {ref} above {other}", "Is {ref} over {other}", "Is {ref} higher than {other}"],
    "yes_below": ["Is {ref} [below|under] {other}", "Is {ref} lower than {other}", "Is {ref} beneath {other}"],
    "yes_bigger": ["Is {ref} [bigger|larger] than {other}"],
    "yes_smaller": ["Is {ref} smaller than {other}"],
    "yes_read": [
        "Does it say {q}{w}{q}", "Is the [word|text] {q}{w}{q}", "Does {thispic} say {q}{w}{q}", "Is {q}{w}{q} written{inpic}",
        "Does the text read {q}{w}{q}", "Can you see the [word|text] {q}{w}{q}",
    ],
    "yes_text": [
        "Is there [any |]text{inpic}", "Is there a word{inpic}", "Do you see [any |]text{inpic}", "Does {thispic} contain [any |]text",
        "Is [something|anything] written{inpic}", "Is there any writing{inpic}",
    ],
    "follow_color": ["[And|And|Now|OK, and|Then] [what|which] {color} is it", "What {color} is it", "And its {color}", "And the {color}", "What is its {color}", "[What|Which] {color}", "Now tell me its {color}", "And what {color} does it have"],
    "follow_shape": ["[And|Now|OK, and] [what|which] shape is it", "What shape is it", "And its shape", "And the shape", "What is its shape", "And what is it", "[What|Which] shape"],
    "follow_where": ["[And|Now|OK, and|Then] where is it", "Where is it", "And where", "And its position", "Where is it{inpic}", "Now where is it", "And where is it [located|placed]"],
    "follow_other": ["And {ref}", "What about {ref}", "And what about {ref}", "How about {ref}", "Now {ref}", "And for {ref}"],
    "sure": ["Are you sure", "Really", "Is that right", "Are you certain", "Is that correct", "Sure", "Are you sure about that"],
    "thanks": ["Thanks", "Thank you", "Great, thanks", "Thanks a lot", "Thank you very much", "OK, thanks", "Perfect, thank you"],
}  # fmt: skip
MACROS["a_pic"] = "[a picture|an image|a photo|a screenshot]"

ENDINGS = {
    "word": ["Answer in one word.", "One word.", "Answer with one word.", "Answer with a single word.", "Reply with one word only.", "Use one word.", "One word only.", "Just one word.", "Answer briefly.", "Be brief.", "Only the answer, please.", "Reply with a single word.", "Answer in a single word, lowercase.", "In one word."],
    "color": ["Reply with just the {color}.", "Answer with just the {color}.", "Only name the {color}.", "Just the {color}.", "Reply with the {color} only.", "Answer with the {color} name only.", "Just say the {color}."],
    "shape": ["Reply with just the shape.", "Just the shape.", "Only the shape name.", "Answer with the name of the shape only.", "Reply with the shape only."],
    "number": ["Answer with a number.", "Just the number.", "Reply with just the number.", "Answer with a single number.", "Answer with a digit.", "Only the number.", "Number only.", "Reply with a number only."],
    "yes": ["Answer yes or no.", "Yes or no?", "Reply yes or no.", "Answer with yes or no.", "Just yes or no.", "Answer only yes or no.", "(yes/no)"],
    "text": ["Reply with just the text.", "Just the text.", "Reply with only the text.", "Answer with the text only.", "Only the text, please.", "Reply with exactly the text.", "Just the word.", "Output only the text.", "Reply with just the word.", "Keep the case.", "Nothing else."],
    "place": ["Answer left, right, top, bottom or middle.", "Just the position.", "Answer briefly.", "One or two words.", "Reply with the position only."],
    "free": ["Answer briefly.", "Be brief.", "Keep it short."],
    "sentence": ["One sentence.", "Use one sentence.", "Keep it short.", "Be brief."],
}  # fmt: skip

POLITE = (
    "Please ",
    "Could you tell me: ",
    "Hi! ",
    "Hello. ",
    "Question: ",
    "Hey, ",
    "Quick question: ",
)
PLACES = {
    "left": ["on the left", "on the left side", "at the left", "to the left", "in the left part"],
    "right": ["on the right", "on the right side", "at the right", "to the right", "in the right part"],
    "top": ["at the top", "on top", "in the top part", "in the upper part", "at the top of the {pic}"],
    "bottom": ["at the bottom", "on the bottom", "in the lower part", "in the bottom part", "at the bottom of the {pic}"],
    "middle": ["in the {center}", "in the {center} of the {pic}", "at the {center}", "in the very {center}"],
    "top left": ["[in|at] the top left", "in the [top|upper] left corner", "in the upper left"],
    "top right": ["[in|at] the top right", "in the [top|upper] right corner", "in the upper right"],
    "bottom left": ["[in|at] the bottom left", "in the [bottom|lower] left corner", "in the lower left"],
    "bottom right": ["[in|at] the bottom right", "in the [bottom|lower] right corner", "in the lower right"],
}  # fmt: skip
NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six")


def expand(rng: random.Random, template: str, **slots: str) -> str:
    """One wording of the template: macros, then choices, then slots."""
    text = template
    for _ in range(6):
        before = text
        for name, macro in MACROS.items():
            if name not in slots:
                text = text.replace("{" + name + "}", macro, 1)
        while match := CHOICE.search(text):
            chosen = rng.choice(match[1].split("|"))
            text = text[: match.start()] + chosen + text[match.end() :]
        if text == before:
            break
    for name, value in slots.items():
        text = text.replace("{" + name + "}", value)
    return text


def place_phrase(rng: random.Random, place: str) -> str:
    return expand(rng, rng.choice(PLACES[place]))


def ask(rng: random.Random, task: str, ending: str | None = None, **slots: str) -> str:
    """A question of that task, dressed as people do."""
    text = expand(rng, rng.choice(TASKS[task]), **slots)
    return dress(rng, text, ending)


def dress(rng: random.Random, text: str, ending: str | None) -> str:
    is_question = text.split(" ")[0].lower().rstrip(",") not in IMPERATIVES
    if rng.random() < 0.05:
        text = rng.choice(POLITE) + text[0].lower() + text[1:]
    kind = rng.random()
    if kind < 0.72:
        text = text[0].upper() + text[1:]
    elif kind < 0.9:
        text = text[0].lower() + text[1:]
    mark = rng.random()
    if is_question:
        text += "?" if mark < 0.85 else ""
    else:
        text += ", please." if mark < 0.08 else "." if mark < 0.55 else ""
    if ending is not None and rng.random() < 0.28:
        extra = expand(rng, rng.choice(ENDINGS[ending]))
        if text[-1].isalnum():
            text += "."
        text += ("\n" if rng.random() < 0.08 else " ") + extra
    return text


IMPERATIVES = {
    "name", "identify", "tell", "count", "please", "describe", "read", "transcribe", "give", "locate",
    "extract", "write", "copy", "find", "caption", "summarize", "explain", "classify", "recognize",
    "recognise", "guess", "put", "ocr", "text", "number", "shape", "position", "background", "spell", "thanks",
    "thank", "great", "ok", "perfect", "color", "colour", "i", "look",
}  # fmt: skip
