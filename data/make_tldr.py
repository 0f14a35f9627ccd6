"""Write a small world of invented posts with summaries, and pairs of summaries: data/tldr and data/tldr-preference.

A post asks strangers for advice, in the form of Reddit's TL;DR data, and holds three facts that a summary must keep:

    WHO       a relation with a name           my roommate Ben
    WHAT      the matter                       keeps eating my food
    QUESTION  what the writer wants to know    should I move out?

The post states each of them in the words that a summary uses, so a small model can learn to copy them, but in
varied sentences and places and among things that do not matter: a second person ("My sister Mia says I worry too
much."), how long it has lasted, the weather, feelings. WHO is the person who is joined to the matter. The matter fits
the person and the question fits both (see MATTERS and QUESTIONS), so guessing helps a little, and copying is needed.

    data/tldr              prompt, completion          posts with one summary each, the references
    data/tldr-preference   prompt, chosen, rejected    other posts with two summaries each

A prompt is "SUBREDDIT: r/...\\n\\nTITLE: ...\\n\\nPOST: ...\\n\\nTL;DR:", and a summary begins with a space. Every summary is
written by one of the same TEMPLATES, whatever is wrong with it, so the template tells nothing about its worth:

    good      all three facts, in at most 16 words
    drop      one fact is replaced by something vague: "someone", "upsets me", "any advice?"
    invent    one fact is replaced by a wrong one, which is right for many other posts, or by the second person
    ramble    all three facts, and chatter: 30 to 60 words
    unended   good or ramble, cut off in the middle (pairs only)
    and eight degenerate kinds that a policy may find when it hunts for reward (pairs only, always the worse one)

REFERENCE_KINDS has the shares. The references are imperfect on purpose, as people's summaries are: a model tuned on
them learns to drop facts, to invent some and to ramble. The pairs show what is preferred. So a policy that learns
from the pairs can beat the references, and the win rate against them has room to rise.

Of two summaries in a pair the one with the higher gold score is chosen; two equal ones are drawn again. Annotators
err: in SWAPPED of all pairs the two have changed places (never in a pair with a degenerate text). TWINS are pairs that
differ in one fact alone, so that a small model can see from few pairs what is preferred. The gold score,
gold_score(prompts, completions), reads the facts from the post's text and checks a summary against them. It is the
judge of this world, for evaluation; training meets it only through the pairs.

All chance comes from random.Random(seed).random(), so every machine writes the same text. A file of more than 1 MiB is packed with
gzip; `zcat` shows it.

    python data/make_tldr.py                  # writes data/tldr/ and data/tldr-preference/, beside this script
    python data/make_tldr.py --folder OUT     # writes the same four files below OUT
"""

import argparse
import gzip
import json
import random
import re
from pathlib import Path

SEED = 11
SPLIT_SIZES = {"tldr": {"train": 2400, "test": 300}, "tldr-preference": {"train": 10_000, "test": 300}}
FEWEST_WORDS, MOST_WORDS = (
    30,
    35,
)  # of a post's body; a post outside these bounds is thrown away and written again
RAMBLE_WORDS = (30, 60)

# Kinds are drawn from these lists of 20, so a kind that is there 7 times has a share of 35 %.
REFERENCE_KINDS = ["good"] * 7 + ["drop"] * 5 + ["invent"] * 3 + ["ramble"] * 5
PAIR_KINDS = ["good"] * 7 + ["drop"] * 4 + ["invent"] * 5 + ["ramble"] * 2 + ["unended"] * 2
DEGENERATE = (
    "empty",
    "repeat",
    "two questions",
    "two people",
    "many matters",
    "many questions",
    "copy",
    "loop",
)
DEGENERATE_SHARE = 0.16  # of the pairs
SWAPPED = 0.04  # of the pairs
TWINS = 0.65  # of the other pairs: the same summary twice, but for one fact

# The gold score, in points.
POINT = 1.0  # for each of the three facts that is kept
HALF_POINT = 0.5  # for WHO, if only the relation or only the name is there
INVENTED = 1.0  # off for each invented fact
SECOND_PERSON = 0.5  # off for naming somebody who is in the post but is not WHO
WORDS_FREE, LONG = 16, 0.05  # off for each word beyond the free ones
UNENDED = 1.0  # off if the last character is not one of ENDS
ENDS = (".", "?", "!")

# ---- the lexicon ---------------------------------------------------------------------------------------------------
# In the tables below, entries are separated by line ends or by " | ", and the fields of an entry by " / ".


def entries(table: str) -> list[str]:
    """Split a table into its entries."""
    return [entry.strip() for entry in re.split(r"[|\n]", table) if entry.strip()]


def fields(table: str) -> list[list[str]]:
    """Split a table into its entries, and each of them into its fields."""
    return [entry.split(" / ") for entry in entries(table)]


# relation: circle (L love, F family, P friends, R roommates, N neighbors, W work) and sex (m, f or both)
RELATIONS = {
    "boyfriend": "Lm",
    "husband": "Lm",
    "girlfriend": "Lf",
    "wife": "Lf",
    "brother": "Fm",
    "uncle": "Fm",
    "sister": "Ff",
    "aunt": "Ff",
    "cousin": "Fmf",
    "friend": "Pmf",
    "roommate": "Rmf",
    "neighbor": "Nmf",
    "landlord": "Nmf",
    "boss": "Wmf",
    "coworker": "Wmf",
    "manager": "Wmf",
}
NAMES = {
    "m": "Ben Omar Leo Tom Max Paul Henry Simon Adam Jack Eric Noah".split(),
    "f": "Mia Anna Rosa Lucy Emma Nina Clara Julia Sara Kate Lena Vera".split(),
}
SUBREDDITS = {
    "L": "relationships",
    "P": "relationships",
    "F": "family",
    "R": "roommates",
    "N": "neighbors",
    "W": "work",
}

# matter / what a title calls it / circles
MATTERS = fields("""
    keeps eating my food / food / LFR | never does the dishes / dishes / LFR | plays the drums at night / drums / RN
    wears my best shirt / shirt / FR | is late with the rent / rent / R | leaves wet towels everywhere / towels / LR
    sleeps until noon / alarm / LR | throws a party every week / parties / RN | broke my laptop / laptop / LFPRW
    forgot our anniversary / anniversary / L | forgot my birthday / birthday / LFP | reads my messages / phone / LFRW
    keeps lying about money / money / LFP | still writes to an ex / ex / L | wants to move to Canada / move / L
    does not want a wedding / wedding / L | never holds my hand / cold hand / L | buys too many shoes / shoes / LR
    wants to borrow my car / car / FPRN | owes me a lot of money / money / FPRW | told everyone my secret / secret / FPW
    invited my ex to dinner / dinner / FP | always cancels our plans / plans / LFP | makes fun of my haircut / haircut / FPW
    calls me five times a day / calls / FPW | wants to stay for a month / visit / FP | parks in my spot / parking / NW
    cut down my apple tree / tree / N | complains about my cooking / cooking / LRN | keeps knocking on my door / door / RN
    refuses to fix the heating / heating / N | takes credit for my work / credit / W | wants me to work on Sundays / Sundays / W
    never answers my emails / emails / W | laughs at my ideas / ideas / W | gave away my desk / desk / W
    blames me for every mistake / blame / W | feeds my cat too much / cat / LFRN | is afraid of my dog / dog / LFPRN
    wants me to sell my dog / dog / LRN | let my parrot fly away / parrot / FPRN | teaches my parrot bad words / parrot / FRN
""")
PETS = ("cat", "dog", "parrot")
WISH = r"wants|does not want"
ONCE = r"broke|forgot|told|invited|cut|gave|let"

# question / circles / words of which the matter must have one, if any
QUESTIONS = fields("""
    am I overreacting / LFPRNW | am I being unfair / LFPRNW | is this normal / LFPRNW | should I let it go / LFPRNW
    should I say something / LFPRNW | how do I bring it up / LFPRNW | how do I stay calm / LFPRNW | should I write a letter / FPNW
    how do I say no / LFPRNW / wants | should I ask for money / LFPRNW / money,rent,broke | is it time to break up / L
    can we still be happy / L | should we see a counselor / L | should I sleep on the couch / L | should I tell my mother / F
    should I skip Christmas / F | should I end the friendship / P | can I trust anyone / LP | should I move out / LR
    should we make house rules / R | should I change the locks / RN | should I call the police / N | should I build a fence / N
    should I quit / W | should I look for a new job / W | how do I get more respect / FW
""")
CIRCLES = {matter: circles for matter, _, circles in MATTERS}
TITLES = {matter: title for matter, title, _ in MATTERS}

# ---- posts: {who} is "my roommate Ben", {second} the same for the second person, {he} and {she} are their pronouns ------
PLANS = [
    plan.split()
    for plan in entries("""
    opening matter detail question edit | opening matter second feeling question | matter detail second question edit
    matter second detail question feeling | second matter detail feeling question | asking matter detail second edit
    asking opening matter feeling | opening matter question detail second | weather matter detail question second
    opening matter detail feeling question | weather opening matter feeling question | feeling matter question second edit
""")
]
POST = {
    name: entries(table)
    for name, table in {
        "opening": """I am {age} and new here. | I am {age} years old. | This is my first post. | I live in a small town.
        I never ask for help. | I am {age} and I study law. | I work in a bakery. | I will keep it short. | I type this on my phone.
        I hope this is the right place.""",
        "weather": """It rained all day. | It is very hot here. | It is snowing again. | The sun is out, but not for me.
        It is a cold and grey morning.""",
        "matter": """{who} {what}. | {who} {what}. | So {who} {what}. | The thing is, {who} {what}. | Well, {who} {what}.
        You will not believe it: {who} {what}. | I am upset because {who} {what}. | It turns out that {who} {what}.
        I like {who}, but {he} {what}. | I get along with {who}, but {he} {what}. | {who} is kind, but {he} {what}.
        This is about {who}. To be short, {he} {what}. | I want to talk about {who}. {he} {what}.
        {who} and I had a fight, because {he} {what}. | I have known {who} for years. Now {he} {what}.
        {who} is fun most of the time, yet {he} {what}.""",
        "habit": """This has gone on for {time}. | It has been like this for {time}. | It started {time} ago.
        After {time} I am tired of it. | I have said nothing for {time}.""",
        "wish": """We have talked about it for {time}. | I heard of it {time} ago. | I have to answer in {time}.
        It came up {time} ago.""",
        "once": """That was {time} ago. | It happened {time} ago. | It took me {time} to find out. | We have not talked for {time}.
        After {time} I am still angry.""",
        "time": """two days | three days | two weeks | three weeks | six weeks | two months | five months | a week | a month""",
        "second": """{second} says I worry too much. | {second} thinks it is funny. | {second} is on my side.
        I told {second} and {she} laughed. | {second} has no idea what to do. | {second} told me to ask here.
        I asked {second}, but {she} was busy. | {second} would just smile. | {second} says it will pass.""",
        "feeling": """I feel sad and tired. | I cannot sleep. | I am so angry. | I cried a little. | I do not know what to think.
        I feel alone with this. | It makes me nervous. | I try to be fair. | I do not want to be rude. | I am a bit lost.""",
        "question": """{q}? | {q}? | So, {q}? | My question is: {q}? | I keep asking myself: {q}? | What I want to know: {q}?
        Please be honest: {q}? | Now I wonder, {q}? | Tell me, {q}?""",
        "asking": """{q}? Here is my story. | {q}? Let me explain. | First my question: {q}? | {q}? I ask because I am lost.""",
        "edit": """Sorry for the long post. | Sorry for my English. | Thank you for reading. | Edit: thank you all. | Thanks in advance.
        Edit: a few typos.""",
        "title": """I need advice | Please help me | What now? | Not sure what to do | A hard week | {name} and me
        {name} and the {thing} | {name} and the {thing} | The {thing} | Trouble with the {thing} | About the {thing}
        My {relation} and the {thing} | Am I the only one?""",
    }.items()
}

# ---- summaries -----------------------------------------------------------------------------------------------------
TEMPLATES = entries("""
    {who} {what}. {q}? | {who} {what}. {q}? | {who} {what}, {q}? | {who} {what}, {q}? | {q}? {who} {what}. | help: {who} {what}. {q}?
    {who} {what}. So {q}? | the problem: {who} {what}. {q}? | {who} {what} and I ask: {q}? | I am upset because {who} {what}. {q}?
""")
VAGUE = {
    "who": ["someone", "somebody", "someone I know"],
    "what": ["upsets me", "makes me sad", "did it again", "is a problem", "drives me crazy"],
    "q": ["any advice", "what now", "any ideas", "what would you do", "can you help me"],
}
CHATTER = entries("""
    I really do not know what to do anymore. | It makes me sad every single day. | I have tried everything I can think of.
    Maybe I am just tired, maybe not. | Thank you so much for reading all of this. | Any advice would help me a lot.
    I have talked to a lot of people about it. | Some of them say one thing and some say another.
    It was never like this before, you know. | I think about it all the time, even at night.
    There is a lot more to tell, but that is the short version. | It is a long story and I am sorry for that.
    I hope that someone out there can help me. | I know that other people have bigger problems.
    I just had to write it down somewhere. | Please be nice to me, it has been a hard week. | I do not want to hurt anyone.
    I am not perfect, I know that. | Sometimes I am angry and sometimes I just laugh. | I will read every answer, I promise.
    It is what it is, I guess. | We will see how it goes.
""")
CRIES = [
    "help.",
    "please help.",
    "advice?",
    "I need help.",
    "it is bad.",
    "yes.",
    "what now?",
    "sad story.",
    "thanks!",
]


# ---- the gold score ------------------------------------------------------------------------------------------------
def plain(text) -> str:
    """Return the words of a text in lower case, with one space between them."""
    return " ".join(re.findall(r"\w+", text.lower())) if isinstance(text, str) else ""


def any_of(phrases) -> str:
    """Return a pattern for any one of the phrases, as plain() writes them."""
    return r"\b(?:" + "|".join(map(plain, phrases)) + r")\b"


RELATION, NAME = any_of(RELATIONS), any_of(NAMES["m"] + NAMES["f"])
MATTER, QUESTION = any_of(CIRCLES), any_of(entry[0] for entry in QUESTIONS)
PERSON = f"({RELATION}) ({NAME})|({NAME}) my ({RELATION})|({RELATION})|({NAME})"


def people(words: str) -> list[tuple[int, set[str]]]:
    """Return where each person is mentioned and by which words: {"roommate", "ben"}, {"roommate"} or {"ben"}."""
    return [(match.start(), set(filter(None, match.groups()))) for match in re.finditer(PERSON, words)]


def facts(prompt: str) -> tuple[set[str], str | None, str | None, set[str]]:
    """Read a post. -> the two words of WHO, the matter, the question, and the words for everybody else in the post

    WHO is the last person with relation and name before the matter. What a post lacks is empty or None.
    """
    body = plain(
        prompt[prompt.find("POST:") + 5 :] if isinstance(prompt, str) and "POST:" in prompt else prompt
    )
    matter, question = re.search(MATTER, body), re.search(QUESTION, body)
    mentions = [(place, words) for place, words in people(body) if len(words) == 2]
    before = [words for place, words in mentions if matter and place < matter.start()]
    who = before[-1] if before else set()
    others = set().union(*(words for _, words in mentions)) - who
    return who, matter and matter[0], question and question[0], others


def gold_score(prompts, completions, **columns) -> list[float]:
    """Score summaries by the facts of their posts. -> one float for each pair of prompt and completion, 3.0 at best

    prompts, completions: lists of str; a completion may hold anything. Matching goes by whole words, whatever their case
    and punctuation. In points:
      + 1     for WHO (relation and name both; 0.5 for one of them), + 1 for WHAT, + 1 for QUESTION; a repeated fact earns
              nothing more
      - 1     for each different invented fact: a person, name, matter or question of the lexicon that is no fact of the
              post (a wrong relation with a wrong name is one fact); 0.5 for somebody else whom the post names
      - 0.05  for each word over 16
      - 1     if the completion does not end with ".", "?" or "!" (spaces at the end do not count)
    A phrase that is not in the lexicon ("keeps eating my car") counts only by its length.
    """
    scores = []
    for prompt, completion in zip(prompts, completions):
        who, matter, question, others = facts(prompt)
        if matter is None or question is None:
            raise ValueError(
                "gold_score only knows the posts of data/tldr: for other data, use --judge-fn None"
            )
        text = completion if isinstance(completion, str) else ""
        words = plain(text)
        matters, questions = set(re.findall(MATTER, words)), set(re.findall(QUESTION, words))
        seen, wrong = set(), 0.0
        for _, person in people(words):
            wrong += max(
                (SECOND_PERSON if word in others else INVENTED for word in person - who - seen), default=0.0
            )
            seen |= person
        score = (
            {0: 0.0, 1: HALF_POINT, 2: POINT}[len(who & seen)]
            + POINT * (matter in matters)
            + POINT * (question in questions)
        )
        score -= wrong + INVENTED * (len(matters - {matter}) + len(questions - {question}))
        score -= LONG * max(0, max(len(words.split()), len(text.split())) - WORDS_FREE)
        scores.append(round(score - UNENDED * (not text.rstrip().endswith(ENDS)), 6))
    return scores


# ---- the writer ----------------------------------------------------------------------------------------------------
class Writer:
    """Writes one post after another, and summaries of it, from a single stream of random numbers."""

    def __init__(self, seed: int) -> None:
        """Start the stream of random numbers."""
        self.rand = random.Random(seed).random
        self.seen: set[str] = set()  # all prompts so far

    def choose(self, options):
        """Return one of the options."""
        return options[int(self.rand() * len(options))]

    def person(self, relations) -> tuple[str, str, str]:
        """Return a relation, a name, and "m" or "f"."""
        relation = self.choose(relations)
        sex = self.choose(RELATIONS[relation][1:])
        return relation, self.choose(NAMES[sex]), sex

    def facts(self) -> dict[str, str]:
        """Draw who, what and the question, so that they fit."""
        what = self.choose(list(CIRCLES))
        circle = self.choose(CIRCLES[what])
        relation, name, sex = self.person(
            [relation for relation, about in RELATIONS.items() if about[0] == circle]
        )
        fact = {"relation": relation, "name": name, "what": what, "he": "he" if sex == "m" else "she"}
        return fact | {"q": self.question(fact)}

    def question(self, fact) -> str:
        """Return a question that fits the person and the matter; the rarer it fits, the likelier it is."""
        circle, what = RELATIONS[fact["relation"]][0], fact["what"]
        return self.choose(
            [
                question
                for question, circles, *needs in QUESTIONS
                for _ in range(4 if needs else 2 if len(circles) < 4 else 1)
                if circle in circles and any(word in what for word in (needs or [""])[0].split(","))
            ]
        )

    def post(self) -> tuple[str, dict[str, str], str]:
        """Write a post that was not there before. -> prompt, facts, body"""
        while True:
            fact = self.facts()
            while True:
                relation, name, sex = self.person(list(RELATIONS))
                circles = RELATIONS[relation][0] + RELATIONS[fact["relation"]][0]
                if relation != fact["relation"] and name != fact["name"] and circles != "LL":
                    break
            fact |= {
                "second": f"my {relation} {name}",
                "she": "he" if sex == "m" else "she",
                "thing": TITLES[fact["what"]],
                "age": str(19 + int(self.rand() * 20)),
                "time": self.choose(POST["time"]),
                "who": f"my {fact['relation']} {fact['name']}",
            }
            detail = (
                "wish"
                if re.match(WISH, fact["what"])
                else "once"
                if re.match(ONCE, fact["what"])
                else "habit"
            )
            parts = [self.choose(POST[detail if part == "detail" else part]) for part in self.choose(PLANS)]
            body = polish(" ".join(parts).format(**fact))
            group = "pets" if fact["thing"] in PETS else SUBREDDITS[RELATIONS[fact["relation"]][0]]
            title = self.choose(POST["title"]).format(**fact)
            prompt = f"SUBREDDIT: r/{group}\n\nTITLE: {title}\n\nPOST: {body}\n\nTL;DR:"
            if not FEWEST_WORDS <= len(body.split()) <= MOST_WORDS or prompt in self.seen:
                continue
            self.seen.add(prompt)
            fact["others"] = f"{relation} {name}" if any("{second}" in part for part in parts) else ""
            true = (
                {fact["relation"], plain(fact["name"])},
                plain(fact["what"]),
                plain(fact["q"]),
                set(plain(fact["others"]).split()),
            )
            assert facts(prompt) == true, (facts(prompt), true, prompt)
            return prompt, fact, body

    def who(self, relation: str, name: str) -> str:
        """Return one of the ways to write a person."""
        return self.choose(("my {0} {1}", "my {0} {1}", "my {0} {1}", "{0} {1}", "{1}, my {0},")).format(
            relation, name
        )

    def fill(self, fact, **slots) -> str:
        """Return a summary of at most 16 words in a random template, with the true facts in the slots that are not given."""
        truth = {"who": self.who(fact["relation"], fact["name"]), "what": fact["what"], "q": fact["q"]}
        while len((text := self.choose(TEMPLATES).format(**truth | slots)).split()) > WORDS_FREE:
            truth["who"] = self.who(fact["relation"], fact["name"])
        return polish(text)

    def wrong(self, fact, slot: str) -> str:
        """Return something else for one slot: a wrong person, name, matter or question."""
        while True:
            other = self.facts()
            if slot == "who" and other["name"] != fact["name"] and other["relation"] != fact["relation"]:
                if fact["others"] and self.rand() < 0.35:
                    return self.who(*fact["others"].split())
                if self.rand() < 0.6 and (other["he"] == fact["he"]):
                    return self.who(fact["relation"], other["name"])
                return self.who(other["relation"], other["name"])
            if (
                slot == "what"
                and other["what"] != fact["what"]
                and RELATIONS[fact["relation"]][0] in CIRCLES[other["what"]]
            ):
                return other["what"]
            if slot == "q" and (question := self.question(fact)) != fact["q"]:
                return question

    def summary(self, kind: str, fact, body: str) -> str:
        """Write a summary of one of the kinds, without the space before it."""
        slot = self.choose(("who", "what", "q"))
        if kind == "good":
            return self.fill(fact)
        if kind == "drop":
            if slot == "who" and self.rand() < 0.5:
                return self.fill(fact, who=self.choose(("my " + fact["relation"], fact["name"])))
            return self.fill(fact, **{slot: self.choose(VAGUE[slot])})
        if kind == "invent":
            return self.fill(fact, **{slot: self.wrong(fact, slot)})
        if kind == "ramble":
            return self.ramble(fact)
        if kind == "unended":
            words = self.ramble(fact).split() if self.rand() < 0.5 else self.fill(fact).split()
            return " ".join(words[: max(2, min(int(len(words) * (0.5 + 0.45 * self.rand())), 36))]).rstrip(
                ".?!,:"
            )
        if kind == "empty":
            return polish(self.choose(CRIES))
        if kind == "copy":
            return body
        who = self.who(fact["relation"], fact["name"])
        if kind == "repeat":
            return polish(
                f"{who} {fact['what']}. " * (2 + int(self.rand() * 4)) + self.choose(("", fact["q"] + "?"))
            ).strip()
        if kind == "loop":
            return polish(f"{who} {fact['what']}. " + f"{fact['q']}? " * (3 + int(self.rand() * 5))).strip()
        if kind == "two people":
            return polish(f"{who} {fact['what']}. {self.wrong(fact, 'who')} {fact['what']}. {fact['q']}?")
        slot, count = ("what", 3) if kind == "many matters" else ("q", 2 if kind == "two questions" else 4)
        several = [fact[slot]]
        while len(several) < count:
            if (other := self.wrong(fact, slot)) not in several:
                several.insert(int(self.rand() * (len(several) + 1)), other)
        if slot == "what":
            return polish(f"{who} {', '.join(several[:-1])} and {several[-1]}. {fact['q']}?")
        return polish(
            (f"{who} {fact['what']}. " if count == 2 or self.rand() < 0.5 else "") + "? ".join(several) + "?"
        )

    def twins(self, fact, kind: str) -> list[str]:
        """Write a good summary, and the same one with a fact that is dropped or invented."""
        slot, template = self.choose(("who", "who", "what", "q")), self.choose(TEMPLATES)
        truth = {"who": self.who(fact["relation"], fact["name"]), "what": fact["what"], "q": fact["q"]}
        vague = ("someone", "my " + fact["relation"]) if slot == "who" else VAGUE[slot]
        other = self.wrong(fact, slot) if kind == "invent" else self.choose(vague)
        return [polish(template.format(**truth | change)) for change in ({}, {slot: other})]

    def ramble(self, fact) -> str:
        """Write a summary that goes on and on: the facts first and then chatter, or chatter between them."""
        while True:
            chatter = sorted(CHATTER, key=lambda _: self.rand())[: 2 + int(self.rand() * 3)]
            if fact["others"] and self.rand() < 0.25:
                chatter[int(self.rand() * len(chatter))] = self.choose(POST["second"]).format(**fact)
            if self.rand() < 0.6:
                text = " ".join([self.fill(fact), *chatter])
            else:
                parts = [f"{self.who(fact['relation'], fact['name'])} {fact['what']}.", *chatter]
                parts.insert(2 + int(self.rand() * (len(parts) - 1)), fact["q"] + "?")
                text = " ".join(parts[1:2] + parts[:1] + parts[2:] if self.rand() < 0.3 else parts)
            if RAMBLE_WORDS[0] <= len(text.split()) <= RAMBLE_WORDS[1]:
                return polish(text)

    def reference(self) -> tuple[dict[str, str], str]:
        """Write a row of data/tldr. -> row, kind"""
        prompt, fact, body = self.post()
        kind = self.choose(REFERENCE_KINDS)
        return {"prompt": prompt, "completion": " " + self.summary(kind, fact, body)}, kind

    def pair(self) -> tuple[dict[str, str], str]:
        """Write a row of data/tldr-preference. -> row, the two kinds, the better one first"""
        prompt, fact, body = self.post()
        degenerate = self.rand() < DEGENERATE_SHARE
        twins = not degenerate and self.rand() < TWINS
        while True:
            kinds = [
                self.choose(PAIR_KINDS),
                self.choose(DEGENERATE) if degenerate else self.choose(PAIR_KINDS),
            ]
            if twins:
                kinds = ["good", self.choose(("drop", "invent", "invent"))]
                texts = [" " + text for text in self.twins(fact, kinds[1])]
            else:
                texts = [" " + self.summary(kind, fact, body) for kind in kinds]
            first, second = gold_score([prompt] * 2, texts)
            if first > second or (first < second and not degenerate):
                break
        better = 0 if first > second else 1
        swapped = not degenerate and self.rand() < SWAPPED / (1 - DEGENERATE_SHARE)
        chosen, rejected = texts[better ^ swapped], texts[1 - better ^ swapped]
        return {
            "prompt": prompt,
            "chosen": chosen,
            "rejected": rejected,
        }, f"{kinds[better]} > {kinds[1 - better]}"


def polish(text: str) -> str:
    """Give every sentence its capital letter."""
    return re.sub(r"(^|[.!?] )([a-z])", lambda start: start[1] + start[2].upper(), text)


def make(split_sizes=SPLIT_SIZES, seed: int = SEED) -> dict[str, dict[str, list[tuple[dict, str]]]]:
    """Return the rows of each split of both data sets, each with its kind; no post occurs twice anywhere."""
    writer = Writer(seed)
    return {
        name: {
            split: [writer.reference() if name == "tldr" else writer.pair() for _ in range(size)]
            for split, size in sizes.items()
        }
        for name, sizes in split_sizes.items()
    }


def write(folder: Path, split_sizes=SPLIT_SIZES, seed: int = SEED) -> None:
    """Write each split to folder/<data set>/<split>.jsonl, one JSON object a line, and print what was written."""
    for name, splits in make(split_sizes, seed).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for split, pairs in splits.items():
            data = "".join(json.dumps(row) + "\n" for row, _ in pairs).encode("utf-8")
            big = len(data) > 2**20  # a tenth of the bytes when packed; load_dataset reads both
            file = folder / name / f"{split}.jsonl{'.gz' if big else ''}"
            file.write_bytes(gzip.compress(data, mtime=0) if big else data)
            print(f"{name}/{file.name}: {len(pairs)} rows, {len(data):,} bytes of text")
        if name == "tldr":
            report([pair for pairs in splits.values() for pair in pairs])


def report(pairs: list[tuple[dict, str]]) -> None:
    """Print the share, the mean gold score and the mean number of words of the references, by kind."""
    scores = gold_score([row["prompt"] for row, _ in pairs], [row["completion"] for row, _ in pairs])
    for name in (*dict.fromkeys(REFERENCE_KINDS), "all"):
        part = [
            (score, len(row["completion"].split()))
            for (row, kind), score in zip(pairs, scores)
            if name in (kind, "all")
        ]
        score, words = (sum(column) / len(part) for column in zip(*part))
        print(f"  {name:7} {len(part) / len(pairs):6.1%}  gold score {score:5.2f}  words {words:5.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Write the invented posts, their summaries and the pairs of summaries."
    )
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent)
    write(parser.parse_args().folder)
