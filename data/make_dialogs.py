"""Write a small world of invented two-person dialogues: train, validation and test below data/dialogs.

Two people, A and B, talk in turn about everyday things, in the columns of DailyDialog: "dialog" is the list of utterances,
"act" has one number for each of them:

    1 inform       The train to Boston leaves at seven.
    2 question     When does the train to Boston leave?
    3 directive    a request, an order, advice or an offer: Please bring me the soup. Would you like some tea?
    4 commissive   a promise, or the answer to a directive: Certainly, I will bring you the soup.

There are twelve SCENES. A scene is a script of blocks; a line of it is one turn, an act and the ways to say it. Every block
begins with A and ends with B, so that a block marked "?" can be left out (SKIPPED) and the speakers still alternate. The
blocks that stay keep their order, and so the next act follows from the last two utterances most of the time.

The facts are drawn once for a dialogue and stay the same in it: a name, a day, a dish. Some belong together in all dialogues,
as the rows of FACTS say: the soup is always four dollars, the train to Boston always leaves at seven. So an answer takes up
the words of its question, and what it adds can be learned.

Answers vary, as people's do. Of the wordings of a line the first is the typical one (TYPICAL); the others say the same
in part with the same words. After a question or a directive an answer is EVASIVE with the share below, whatever was said
("I am not sure, to be honest."): its words cannot be foreseen, and after a directive its act cannot either. Now and then
the second speaker asks back first (ASKED_BACK), and the first one confirms. So a policy that answers to the point, with the
right act and in the typical wording, is closer to the references on average than one that copies how people vary.

No dialogue occurs twice in any split. All chance comes from random.Random(seed).random(), so every machine writes the same bytes.

    python data/make_dialogs.py                  # writes data/dialogs/, beside this script
    python data/make_dialogs.py --folder OUT     # writes dialogs/ below OUT
"""

import argparse
import json
import random
import re
from collections import Counter, defaultdict
from pathlib import Path

SEED = 17
SPLIT_SIZES = {"train": 2200, "validation": 200, "test": 300}
FEWEST, MOST = 4, 8  # utterances in a dialogue
ACTS = {1: "inform", 2: "question", 3: "directive", 4: "commissive"}
TYPICAL = 0.5  # of the utterances of a line have its first wording, the others share the rest
SKIPPED = 0.5  # of the blocks marked "?"
CUT = 0.3  # of the dialogues lack the last utterance, unless it answers a question or a directive
EVASIVE = 0.15  # of the answers to a question or a directive
ASKED_BACK = 0.08  # of the questions and directives

# ---- the lexicon ---------------------------------------------------------------------------------------------------
# One row of each table is drawn for a dialogue. Rows are separated by " | ", and the fields of a row by " / ".
FACTS = {
    "name": "Ben | Mia | Tom | Anna | Leo | Lucy | Paul | Emma",
    "friend": "Jack | Rosa | Max | Nina | Omar | Kate",
    "day": "Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday",
    "later": "Monday | Tuesday | Wednesday | Thursday | Friday",
    "time": "one | two | three | four | five | six | seven | eight",
    "number": "two | three | four | five | six",
    "span": "two days | three days | a week | two weeks | a month",
    "drink": "tea | coffee | water | milk | juice",
    "dish/price": "soup / four dollars | fish / nine dollars | salad / five dollars | pizza / six dollars | chicken / eight dollars"
    " | rice / three dollars | steak / ten dollars",
    "city/leaves/platform/fare": "Boston / seven / two / ten dollars | Paris / eight / five / fifty dollars"
    " | London / six / one / forty dollars | Rome / nine / four / sixty dollars"
    " | Berlin / three / six / thirty dollars | Madrid / five / three / twenty dollars",
    "ailment/remedy": "headache / two pills | cough / some syrup | fever / cold water | cold / hot tea | sore throat / some honey"
    " | toothache / one pill | stomach ache / warm soup",
    "when": "morning | evening",
    "item/cost": "coat / fifty dollars | shirt / twenty dollars | hat / ten dollars | sweater / thirty dollars | jacket / sixty dollars"
    " | dress / forty dollars",
    "color": "red | blue | green | black | white",
    "room/rate/floor": "single / forty dollars / second | double / sixty dollars / third | quiet / fifty dollars / first"
    " | large / ninety dollars / fourth",
    "nights": "one night | two nights | three nights | a week",
    "paper": "report | letter | contract | plan | budget",
    "tool": "ladder | hammer | bike | drill | tent",
    "store/near": "bakery / park | bank / bridge | pharmacy / church | market / river | school / library",
    "subject/spot": "math / library | history / museum | music / music hall | English / garden | science / lab",
    "place": "bank | market | dentist | library | office | airport",
    "outing/thing": "beach / towels | park / a ball | lake / a boat | museum / a camera | zoo / some bread | cinema / the tickets"
    " | mountains / a map",
    "sky/gear": "rainy / umbrella | cold / coat | sunny / hat | windy / scarf | snowy / boots | hot / water",
    "lost/seen/found": "phone / kitchen / under the table | wallet / car / under the seat | passport / bedroom / in the drawer"
    " | watch / bathroom / near the mirror | bag / hall / behind the door | ring / garden / in the grass"
    " | key / office / on the desk",
}

# A line is an act and its wordings, the typical one first; an empty line ends a block; "?" marks a block that may be left out.
SCENES = {
    "restaurant": """
        3 Could we have a table for {number}, please? | We would like a table for {number}, please. | A table for {number}, please.
        4 Of course, I will find a table for {number}. | Yes, I will get you a table for {number}. | Sure, I will find you one.

        3 I would like the {dish}, please. | Please bring me the {dish}. | Could I have the {dish}, please?
        4 Certainly, I will bring you the {dish}. | Yes, I will bring the {dish} right away. | Sure, I will bring it soon.

        ? 2 How much is the {dish}? | What does the {dish} cost? | And how much do I pay for the {dish}?
        1 The {dish} is {price}. | The {dish} costs {price}. | It is only {price}.

        ? 1 I am also very thirsty. | And I am so thirsty today. | The sun has made me thirsty.
        3 Would you like some {drink}? | Can I offer you some {drink}? | How about some {drink}?
        4 Yes, I would love some {drink}. | Thank you, I will take some {drink}. | No, thanks, I will not have any {drink}.
        1 Our {drink} is very good. | The {drink} is very good here. | It is the best {drink} in town.

        3 Could I have the bill, please? | Please bring me the bill. | I would like the bill, please.
        4 Yes, I will bring the bill right away. | Of course, I will bring you the bill. | Sure, I will be right back.""",
    "station": """
        2 When does the train to {city} leave? | Excuse me, when does the {city} train leave? | What time does the train to {city} leave?
        1 The train to {city} leaves at {leaves}. | The {city} train leaves at {leaves}. | It leaves at {leaves} every day.

        ? 2 Which platform does the train leave from? | What platform does the {city} train leave from? | And from which platform?
        1 The train leaves from platform {platform}. | It leaves from platform {platform}. | You will find it on platform {platform}.

        ? 2 How much is a ticket to {city}? | What does a ticket to {city} cost? | How much do I pay to {city}?
        1 A ticket to {city} is {fare}. | A ticket to {city} costs {fare}. | It is {fare} for one ticket.

        3 Please give me {number} tickets to {city}. | I would like {number} tickets to {city}. | {number} tickets to {city}, please.
        4 Sure, I will print {number} tickets to {city}. | Yes, I will print your {number} tickets. | I will print them right away.

        1 Thank you for your help. | Thanks, you are very kind. | Thank you, that helps me a lot.
        1 You are welcome, have a good trip. | Have a good trip to {city}. | You are welcome, enjoy {city}.""",
    "doctor": """
        1 Good morning, doctor, I have a {ailment}. | I have a bad {ailment}, doctor. | Doctor, my {ailment} is very bad.
        2 How long have you had the {ailment}? | When did the {ailment} begin? | Have you had this {ailment} for long?

        1 I have had the {ailment} for {span}. | I have had it for {span}. | The {ailment} began {span} ago.
        3 You should take {remedy} every {when}. | Please take {remedy} every {when}. | Take {remedy} in the {when}.
        4 All right, I will take {remedy} every {when}. | Yes, I will take {remedy} every {when}. | Thank you, I will do that.
        1 Your {ailment} will be better soon. | Good, the {ailment} will be gone soon. | Then you will feel better soon.

        ? 2 Is a {ailment} dangerous or not? | Is the {ailment} dangerous, doctor? | Is this {ailment} bad for me?
        1 No, a {ailment} is not dangerous. | No, your {ailment} is not dangerous. | No, most people have a {ailment} sometimes.

        2 When can I see you again? | When should I come back? | On which day can I come again?
        1 You can come again on {day}. | You can see me on {day}. | I am here again on {day}.""",
    "shop": """
        2 Do you have a {color} {item}? | Excuse me, do you sell a {color} {item}? | Is there a {color} {item} in this shop?
        1 Yes, we have a {color} {item}. | Yes, we have a nice {color} {item}. | Yes, there is one over there.

        ? 3 Could I try on the {color} {item}? | Please let me try on the {item}. | I would like to try on the {item}.
        4 Of course, I will get the {color} {item}. | Sure, I will get you the {item}. | Yes, I will get it for you.

        ? 2 How does the {item} look on me? | Does the {color} {item} look good? | Do you like the {item} on me?
        1 The {color} {item} looks very good on you. | The {item} looks good on you. | You look very good in {color}.

        ? 2 How much is the {color} {item}? | What does the {item} cost? | And how much do I pay for the {item}?
        1 The {color} {item} is {cost}. | The {item} costs {cost}. | It is only {cost} today.

        4 Good, I will take the {color} {item}. | I will buy the {color} {item}. | Then I will take the {item}.
        1 Thank you, the {item} is a good choice. | Thank you, that is a good choice. | You will be happy with the {item}.""",
    "hotel": """
        3 I would like a {room} room for {nights}. | Please give me a {room} room for {nights}. | Could I have a {room} room for {nights}?
        4 Certainly, I will give you a {room} room for {nights}. | Yes, I will get you a {room} room. | Sure, I will find you a room.

        ? 2 How much is the {room} room? | What does a {room} room cost? | How much do I pay for the {room} room?
        1 The {room} room is {rate} a night. | A {room} room costs {rate} a night. | It is {rate} for one night.

        ? 3 Please wake me up at {time}. | Could you wake me up at {time}? | I would like a wake-up call at {time}.
        4 Of course, I will wake you up at {time}. | Yes, we will wake you at {time}. | Sure, I will call you at {time}.

        2 Where is my room, please? | On which floor is the {room} room? | Where do I find my {room} room?
        1 Your room is on the {floor} floor. | The {room} room is on the {floor} floor. | You will find it on the {floor} floor.

        ? 4 Thank you, I will go up to my room. | Good, I will take my bags up now. | I will go to my {room} room now.
        1 I hope that you like the {room} room. | The {room} room is very nice. | Here is the key to your room.""",
    "office": """
        2 {name}, have you finished the {paper}? | Is the {paper} ready, {name}? | Have you worked on the {paper}, {name}?
        1 Yes, I have finished the {paper}. | Yes, the {paper} is ready. | The {paper} is nearly ready.

        3 Please send the {paper} to {friend}. | Could you send the {paper} to {friend} now? | Please send {friend} the {paper}.
        4 Sure, I will send the {paper} to {friend}. | Yes, I will send {friend} the {paper}. | I will send it right away.

        ? 2 When is the meeting about the {paper}? | When do we meet about the {paper}? | What day is the meeting with {friend}?
        1 The meeting about the {paper} is on {later}. | The meeting is on {later}. | We meet {friend} on {later}.

        ? 3 Please book a room for the meeting. | Could you book us a room? | You should book a room for us.
        4 Of course, I will book a room for the meeting. | Yes, I will book a room. | I will do that today.

        4 I will read the {paper} with you. | Good, I will help you with the {paper}. | Then I will check the {paper} tonight.
        1 Thank you, that is very kind of you. | Thank you for helping me with the {paper}. | Thank you, two heads are better than one.""",
    "neighbor": """
        1 Hello, I am {name}, your new neighbor. | Good morning, my name is {name}. | Hi, I am {name} from next door.
        1 Nice to meet you, {name}. I am {friend}. | Hello, {name}, nice to meet you. | Welcome to our house, {name}.

        ? 2 How long have you lived in this house? | Have you lived here for long? | When did you move in here?
        1 I have lived in this house for {number} years. | I have lived here for {number} years. | I moved in {number} years ago.

        ? 2 Is there a good {store} near here? | Where is the nearest {store}? | Do you know a good {store}?
        1 There is a good {store} near the {near}. | The {store} near the {near} is good. | You will find one near the {near}.

        3 Could you lend me your {tool}? | Please lend me your {tool} for a day. | I need your {tool}, please.
        4 Of course, I will lend you my {tool}. | Yes, I will lend you the {tool}. | Sure, I will get it for you.

        4 Thank you, I will bring it back on {day}. | I will bring the {tool} back on {day}. | You will get the {tool} back on {day}.
        1 That is fine, I am at home on {day}. | Good, {day} is fine with me. | I do not need the {tool} before {day}.""",
    "school": """
        2 Did you do the {subject} homework? | {name}, have you done the {subject} homework? | Is the {subject} homework done, {name}?
        1 Yes, I did the {subject} homework last night. | I did the {subject} homework on {day}. | No, the {subject} homework is too hard.

        ? 2 When is the {subject} test? | On which day is the {subject} test? | When do we write the {subject} test?
        1 The {subject} test is on {later}. | We write the {subject} test on {later}. | It is on {later}, I think.

        ? 2 What is the {subject} teacher like? | What do you think of the {subject} teacher? | How do you like the {subject} teacher?
        1 The {subject} teacher is nice. | I like the {subject} teacher very much. | The {subject} teacher is new here, but nice.

        3 Let us study {subject} in the {spot}. | How about studying {subject} in the {spot}? | Come and study {subject} in the {spot}.
        4 Good idea, I will come to the {spot}. | Yes, I will meet you in the {spot}. | Sure, I will study {subject} with you.

        4 I will bring my {subject} book. | Then I will bring the {subject} book. | I will bring my book and some {drink}.
        1 Great, I have lost my {subject} book. | That is good, I have no {subject} book. | Good, that book helps a lot.""",
    "phone": """
        3 Hello, may I speak to {friend}? | This is {name}, may I speak to {friend}? | I would like to speak to {friend}, please.
        1 I am sorry, {friend} is not at home. | Sorry, {friend} is not here. | {friend} is out at the moment.

        ? 2 Where is {friend} now? | Do you know where {friend} is? | Where did {friend} go today?
        1 {friend} is at the {place}. | {friend} went to the {place}. | I think {friend} is at the {place}.

        2 When will {friend} be back? | What time will {friend} be home? | When does {friend} come home?
        1 {friend} will be back at {time}. | {friend} will be home at {time}. | I think {friend} comes home at {time}.

        3 Please tell {friend} to call {name}. | Could you tell {friend} to call {name}? | Please ask {friend} to call {name} tonight.
        4 Sure, I will tell {friend} to call {name}. | Yes, I will tell {friend} to call you. | I will tell {friend} tonight.

        1 Thank you very much, and goodbye. | Thanks for your help, goodbye. | That is very kind, goodbye.
        1 You are welcome, goodbye, {name}. | Goodbye, {name}, have a nice day. | It was nice to hear you, {name}.""",
    "weekend": """
        2 What are you doing on {day}, {name}? | {name}, do you have plans for {day}? | Are you free on {day}, {name}?
        1 I have no plans for {day}. | I am free on {day}. | I am doing nothing on {day}.

        3 Let us go to the {outing} on {day}. | How about going to the {outing}? | Would you like to go to the {outing}?
        4 Yes, I would love to go to the {outing}. | Good idea, I will go to the {outing} with you. | I will come if I can.

        ? 2 When should we meet on {day}? | What time should we meet? | When can we go to the {outing}?
        1 We can meet at {time} on {day}. | We can meet at {time}. | The best time is {time}, I think.

        ? 3 Please bring {thing} to the {outing}. | Could you bring {thing}, please? | You should bring {thing} with you.
        4 Sure, I will bring {thing} to the {outing}. | Yes, I will bring {thing}. | All right, I will do that.

        4 I will ask {friend} to come with us. | Good, I will call {friend} too. | I will bring {friend} along.
        1 Great, {friend} likes the {outing}. | That is nice, {friend} likes the {outing}. | I like {friend} very much.""",
    "weather": """
        2 How is the weather in {city} today? | What is the weather like in {city}? | Is the weather good in {city} today?
        1 It is {sky} in {city} today. | The weather in {city} is {sky}. | It has been {sky} since {day}.

        ? 2 Will it be {sky} tomorrow as well? | Will it still be {sky} tomorrow? | How will it be tomorrow?
        1 Yes, it will be {sky} tomorrow as well. | I think it will be {sky} tomorrow. | It will be {sky} until {later}.

        1 I have to go out in this {sky} weather. | I must go out now. | I want to walk to the {place}.
        3 You should take your {gear} with you. | Do not forget your {gear}. | Please take your {gear} with you.
        4 You are right, I will take my {gear}. | Yes, I will take my {gear} with me. | Thanks, I will do that.
        1 Your {gear} will help you a lot. | Good, you need your {gear} today. | It is good to have your {gear} today.

        ? 2 Do you like {sky} days? | Do you like it when it is {sky}? | How do you like this {sky} weather?
        1 Yes, I like {sky} days very much. | I like {sky} weather very much. | No, I do not like {sky} days.""",
    "lost": """
        1 I cannot find my {lost} anywhere. | I think that I have lost my {lost}. | My {lost} is not in my pocket.
        2 Where did you see your {lost} last? | Where did you last have your {lost}? | Was your {lost} at home last night?

        1 I saw my {lost} last in the {seen}. | I had my {lost} in the {seen}. | It was in the {seen} last night.
        3 You should look {found} in the {seen}. | Go and look {found}. | Then please look {found} once more.
        4 All right, I will look {found}. | Yes, I will look {found} now. | Thank you, I will look there.
        1 I hope that you find your {lost}. | I am sure your {lost} is there. | I often find my {lost} there.

        ? 3 Please help me to find my {lost}. | Could you help me to find it? | I need your help with this.
        4 Of course, I will help you to find your {lost}. | Yes, I will help you to find it. | Sure, I will look with you.

        1 Here it is, my {lost} was {found}. | I have found my {lost} {found}. | My {lost} was {found}, thank you.
        1 Great, I am glad that you found your {lost}. | I am glad that you found it. | That is good news for you.""",
}

# What can be said after any question or directive: act and utterances.
EVASIONS = {
    2: """1 I am not sure, to be honest. | Sorry, I really do not know. | That is hard to say. | I would have to ask somebody else.
          1 I have not slept well, you know. | It has been a long day.""",
    3: """4 I will think about it. | Maybe later, I will let you know. | I will see what I can do.
          1 I am a bit busy at the moment. | That is not so easy today. | It has been a long day.""",
}
ASKING_BACK = {  # a question back, and what it is answered
    2: """Sorry, are you talking to me? / Yes, I am talking to you.
          Why do you want to know that? / I want to know because I am curious.""",
    3: """Is that really necessary? / Yes, I think it is necessary.
          Do you really mean that? / Yes, I really mean that.""",
}


def split(text: str, mark: str) -> list[str]:
    """Return the parts of a text, without the space around them."""
    return [part.strip() for part in re.split(mark, text.strip())]


TABLES = [
    (names.split("/"), [split(row, " / ") for row in split(table, r"\|")]) for names, table in FACTS.items()
]
LINE = re.compile(r"(\? )?([1-4]) (.+)")
# scene: its blocks; a block: whether it may be left out, and its lines, each an act and wordings
SCRIPTS = {
    scene: [
        (lines[0][1] is not None, [(int(line[2]), split(line[3], r"\|")) for line in lines])
        for lines in (
            [LINE.fullmatch(line) for line in split(block, "\n")] for block in split(script, r"\n\s*\n")
        )
    ]
    for scene, script in SCENES.items()
}


# ---- the writer ----------------------------------------------------------------------------------------------------
class Writer:
    """Writes one dialogue after another from a single stream of random numbers."""

    def __init__(self, seed: int) -> None:
        """Start the stream of random numbers."""
        self.rand = random.Random(seed).random
        self.seen: set[tuple[str, ...]] = set()  # all dialogues so far

    def choose(self, options):
        """Return one of the options."""
        return options[int(self.rand() * len(options))]

    def word(self, wordings: list[str]) -> str:
        """Return the typical wording or one of the others."""
        return wordings[0] if self.rand() < TYPICAL else self.choose(wordings[1:])

    def facts(self) -> dict[str, str]:
        """Draw the facts of a dialogue."""
        fact = {name: value for names, rows in TABLES for name, value in zip(names, self.choose(rows))}
        return fact if fact["later"] != fact["day"] else self.facts()

    def turns(self, scene: str) -> list[tuple[int, str, str]]:
        """Write the turns of a dialogue, of any number. -> act, text, and the line of the script or what stands for it"""
        turns, lines = [], []
        for number, (optional, block) in enumerate(SCRIPTS[scene]):
            if not optional or self.rand() >= SKIPPED:
                lines += [
                    (act, wordings, f"{scene} {number}.{place}")
                    for place, (act, wordings) in enumerate(block)
                ]
        if self.rand() < CUT and lines[-2][0] not in EVASIONS:
            lines.pop()
        for act, wordings, line in lines:
            last = turns[-1][0] if turns else 0
            if last in ASKING_BACK and self.rand() < ASKED_BACK:
                back, reply = split(self.choose(split(ASKING_BACK[last], "\n")), " / ")
                turns += [(2, back, "asks back"), (1, reply, f"confirms before {line}")]
            if last in EVASIONS and self.rand() < EVASIVE:
                line_of_act = self.choose(split(EVASIONS[last], "\n"))
                turns.append(
                    (int(line_of_act[0]), self.choose(split(line_of_act[2:], r"\|")), f"evades {line}")
                )
            else:
                turns.append((act, self.word(wordings), line))
        return turns

    def dialogue(self, scene: str) -> tuple[dict[str, list], list[str]]:
        """Write a dialogue that was not there before. -> row, the lines of the script"""
        while True:
            turns, fact = self.turns(scene), self.facts()
            if not FEWEST <= len(turns) <= MOST:
                continue
            acts, texts, lines = zip(*turns)
            utterances = tuple(polish(text.format(**fact)) for text in texts)
            if utterances not in self.seen and len(set(utterances)) == len(utterances):
                self.seen.add(utterances)
                return {"dialog": list(utterances), "act": list(acts)}, list(lines)


def polish(text: str) -> str:
    """Give every sentence its capital letter."""
    return re.sub(r"(^|[.!?] )([a-z])", lambda start: start[1] + start[2].upper(), text)


def make(split_sizes=SPLIT_SIZES, seed: int = SEED) -> dict[str, list[tuple[dict, list[str]]]]:
    """Return the rows of each split, each with the lines of its script."""
    writer, scenes = Writer(seed), list(SCRIPTS)
    return {
        name: [writer.dialogue(writer.choose(scenes)) for _ in range(size)]
        for name, size in split_sizes.items()
    }


def write(folder: Path, split_sizes=SPLIT_SIZES, seed: int = SEED) -> None:
    """Write each split to folder/dialogs/<split>.jsonl, one JSON object a line, and print what was written."""
    (folder / "dialogs").mkdir(parents=True, exist_ok=True)
    splits = make(split_sizes, seed)
    for name, pairs in splits.items():
        data = "".join(json.dumps(row) + "\n" for row, _ in pairs).encode("ascii")
        (folder / "dialogs" / f"{name}.jsonl").write_bytes(data)
        print(f"dialogs/{name}.jsonl: {len(pairs)} rows, {len(data):,} bytes")
    report([pair for pairs in splits.values() for pair in pairs])


def report(pairs: list[tuple[dict, list[str]]]) -> None:
    """Print the share of each act, the lengths, and how well the next act follows from what was said before."""
    acts = Counter(act for row, _ in pairs for act in row["act"])
    total = sum(acts.values())
    words = sum(len(text.split()) for row, _ in pairs for text in row["dialog"])
    print(f"  {total / len(pairs):.1f} utterances a dialogue, {words / total:.1f} words an utterance")
    follow, by_line = defaultdict(Counter), defaultdict(Counter)
    for row, lines in pairs:
        for before, after, *lines_before in zip(row["act"], row["act"][1:], ["", *lines], lines):
            follow[before][after] += 1
            by_line[tuple(lines_before)][after] += 1
    print("  share, and how often the next act is " + ", ".join(ACTS.values()))
    for act, name in ACTS.items():
        print(
            f"  {name:10} {acts[act] / total:6.1%}  "
            + " ".join(f"{follow[act][after] / follow[act].total():6.1%}" for after in ACTS)
        )
    for name, table in (("the last act", follow), ("the last two lines of the script", by_line)):
        print(
            f"  the likeliest act after {name} is right in {sum(max(row.values()) for row in table.values()) / (total - len(pairs)):.1%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the invented dialogues.")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent)
    write(parser.parse_args().folder)
