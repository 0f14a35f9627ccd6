"""Write a small world of invented film reviews, with labels: data/reviews/train.jsonl and data/reviews/test.jsonl.

A review is grown from the grammar in RULES. Every rule is a list of alternatives; an alternative is plain text
with slots such as {title} or {adj}, and a slot is filled by a random alternative of the rule of that name.

The label is decided by one idea, the mood. A review has a mood, 1 (positive) or 0 (negative), and

    {adj}     is filled in the mood of the text around it: from the rule "adj+" or from the rule "adj-";
    {!adj}    is filled in the opposite mood;
    {title}   has no mood, because there is only a rule "title", with neither "+" nor "-".

So nearly every sentence is written once and serves both labels. "I expected {!thing} and got {thing}." becomes
"I expected a mess and got a gem." in a positive review and "I expected a gem and got a mess." in a negative one:
the same words, the other order. Other people's opinions, negations and earlier films work the same way, which is
why counting words is not enough to tell the label.

A review is an opening, then a few remarks (the plot, straight praise or blame, or a twist), then a closing: see PLANS.
No alternative is used twice in one review while others are left. The film's title, people and genre are drawn once
for each review. All chance comes from random.Random(seed).random(), so every machine writes the same bytes.

    python data/make_reviews.py                  # writes data/reviews/, beside this script
    python data/make_reviews.py --folder OUT     # writes the same two files somewhere else
    python data/make_reviews.py --seed 8 --train-rows 7200 --folder OUT    # other reviews, for a judge
"""

import argparse
import json
import random
import re
from pathlib import Path

SEED = 7
SPLIT_SIZES = {"train": 3600, "test": 600}
FEWEST_WORDS, MOST_WORDS = 24, 78  # a review outside these bounds is thrown away and written again

# The parts of a review, in order; one line is drawn for each review. A "turn" is an opening with a twist in it.
PLANS = (
    ("opening", "plot", "praise", "twist", "closing"),
    ("opening", "plot", "twist", "praise", "closing"),
    ("opening", "praise", "plot", "twist", "twist", "closing"),
    ("opening", "twist", "plot", "twist", "closing"),
    ("opening", "praise", "twist", "praise", "closing"),
    ("opening", "twist", "praise", "twist", "closing"),
    ("turn", "plot", "twist", "praise", "closing"),
)

# In the tables below, alternatives are separated by line ends or by " | ".
RULES = {
    # ---- the film, its people, and how we came to see it -----------------------------------------------------------
    "a title": """The {Silent} {Harbour} | The {Silent} {Harbour} | The {Silent} {Harbour} | {Midnight} in {Tangier}
        {Letters} from {Tangier} | The {Harbour} of {Tangier} | {Seven} {Letters} | A {Harbour} for {Anna}
        {Anna} and the {Harbour} | Return to {Tangier} | Beyond the {Harbour} | The {Silent} {Letters}
        Last Train to {Tangier} | The {Doctor}'s {Sister} | The {Doctor} of {Tangier} | No {Harbour} for {Anna}""",
    "Silent": """Silent | Golden | Broken | Hidden | Last | Lost | Red | Blue | Secret | Frozen | Second | Distant
        Wild | Paper | Glass | Iron | Winter | Summer | Midnight | Forgotten | Burning | Quiet | Long | Black
        White""",
    "Harbour": """Harbour | River | Garden | Bridge | Island | Lighthouse | Mountain | Window | Mirror | Forest | Street
        House | Road | Promise | Shadow | Kingdom | Orchard | Piano | Station | Letter | Storm | Door | Moon""",
    "Letters": """Letters | Shadows | Strangers | Brothers | Sisters | Ghosts | Lovers | Bells | Ships | Wolves
        Flowers""",
    "Midnight": "Midnight | Summer | Winter | Christmas | Morning | Murder | Snow | Rain | Silence | Thunder",
    "Tangier": "Tangier | Lisbon | Vienna | Berlin | Prague | Cairo | Havana | Rome | Oslo | Paris | Dublin | Madrid",
    "Seven": "Two | Three | Four | Five | Seven | Nine | Twelve | Eleven | Forty",
    "Anna": "Anna | Clara | Omar | Rosa | Henry | Lucy | Leo | Emma",
    "Doctor": "Doctor | Baker | Captain | Painter | Sailor | Soldier | Teacher | Widow",
    "Sister": "Sister | Daughter | Brother | Secret | Garden | Son | House | Ghost | Letter",
    "director": "{first} {last}",
    "first": "Peter | Maria | Robert | Helen | Frank | Julia | Victor | Nina | Martin | Alice | Daniel | Sofia",
    "her name": "Anna | Clara | Rosa | Lucy | Emma | Grace | Irene | Laura | Vera | Sarah",
    "his name": "Omar | Henry | Leo | Paul | Simon | Tom | Max | George | Arthur | Ben",
    "last": """Holm | Rossi | Baker | Novak | Stone | Lang | Moreau | Hart | Weber | Duval | Marlow | Grant | Costa
        Keller | Winter | Bell | Quinn | Sato | Ford | Palmer""",
    "film": "{title} | {title} | {title} | this film | this movie | this {genre}",
    "when": """on a rainy Sunday | on a long flight | at a small festival | late at night | on my birthday
        at the old cinema in our street | with my {friend} | on a cold evening | last weekend
        in an almost empty cinema | after a hard day at work | on my first free night in weeks
        with the whole family""",
    "friend": """brother | sister | wife | husband | uncle | aunt | neighbour | boss | father | mother | cousin
        daughter""",
    "who": """my {friend} | my {friend} | the critics | everybody | my friends | the papers | half the internet
        a friend at work | the man behind me | the other reviews | a colleague | the woman at the ticket desk""",
    "one": """a retired detective | a lonely doctor | a young painter | a nervous spy | an old sailor
        a village teacher | a blind pianist | a bank clerk | a famous writer | a lost soldier | a taxi driver | a widow
        a thief | a cook""",
    "two": """two sisters | two brothers | three old friends | a father and a son | two strangers | two thieves
        four children | a pair of dancers | two rival cooks | three nurses""",
    "do": """inherit a haunted house | find a box of letters | steal the wrong suitcase | fall in love on a train
        open a small bakery | hide a wounded pilot | lose everything in one night | return to a village by the sea
        discover a secret under the floor | follow a stranger across the city | buy an old boat | rob a bank by mistake
        look for a missing child | build a piano out of scrap | wake up in the wrong town | promise to stop lying
        wait for a ship that never comes | plan one last job | get a letter from the dead
        run a hotel in the desert""",
    "plot": """
        The story follows {one} who {does}. | The plot: {one} {does}. | It is about {one} who {does}.
        The story follows {two} who {do}. | The plot: {two} {do}. | It is about {two} who {do}.
        {actor} plays {one} who {does}. | We meet {one} who {does}. | We meet {two} who {do}.
        It begins when {one} {does}. | It begins when {two} {do}. | {one} {does}, and then things happen.
        {director} tells us about {two} who {do}. | {actor} is {one} who {does}.""",
    # ---- single words and short phrases with a mood ----------------------------------------------------------------
    "adj+": """wonderful | brilliant | charming | touching | gripping | clever | moving | superb | lovely | delightful
        excellent | great | beautiful | fresh | honest | witty | stunning | powerful | memorable | remarkable | elegant
        tender | thrilling | graceful | splendid | perfect | outstanding | terrific | fantastic | smart | subtle
        engaging | impressive | absorbing | satisfying | magical | original | marvellous | lively | exciting | warm
        inspired | fascinating | flawless | refreshing""",
    "adj-": """terrible | awful | dull | boring | lazy | clumsy | tedious | dreadful | horrible | weak | stale | shallow
        silly | painful | pointless | empty | poor | messy | ugly | bland | predictable | lifeless | cheap | hollow
        tired | forgettable | laughable | annoying | feeble | confused | pretentious | forced | sloppy | childish
        hopeless | miserable | pathetic | ridiculous | unbearable | careless | dreary | mediocre | disappointing
        exhausting | embarrassing | flat""",
    # mild words are the ones that sound right after "never", "hardly" or "not one ... scene"
    "mild+": """clever | exciting | convincing | moving | touching | charming | original | engaging | gripping | fresh
        memorable | subtle | lively | smart | witty | interesting | beautiful | thrilling | believable | tender""",
    "mild-": """dull | boring | predictable | slow | cheap | silly | clumsy | forced | lazy | shallow | tired | bland
        stale | annoying | confusing | tedious | sloppy | pointless | childish | dreary | careless""",
    "prize+": "gem | joy | treat | delight | triumph | jewel | winner | masterpiece | pleasure | wonder | treasure",
    "prize-": "mess | bore | dud | chore | flop | disaster | wreck | failure | headache | disappointment | nightmare",
    "quality+": """wit | charm | heart | warmth | life | energy | style | imagination | passion | grace | humour | magic
        tenderness | talent | honesty""",
    "quality-": """boredom | nonsense | noise | vanity | confusion | stupidity | padding | cliche | self-pity
        bad taste | empty talk | false tears""",
    "stirred+": "moved | thrilled | touched | charmed | hooked | amused | enchanted | impressed | delighted | gripped",
    "stirred-": "bored | annoyed | confused | embarrassed | irritated | disappointed | insulted | worn out | offended",
    "loved+": "loved | adored | enjoyed | admired | treasured",
    "loved-": "hated | disliked | regretted | loathed | endured",
    "love+": "love | enjoy | adore | admire | like",
    "love-": "hate | dislike | regret | loathe | mock",
    "best+": "best | finest | cleverest | loveliest | smartest",
    "best-": "worst | weakest | dullest | laziest | silliest",
    "rating+": "seven | eight | nine | ten",
    "rating-": "one | two | three | four",
    "act+": "see it | watch it | rent it | buy it | try it | choose it",
    "act-": "skip it | avoid it | ignore it | forget it | drop it",
    "advice+": "{act} | {act} | buy a ticket | go tonight | take your friends | give it a chance | clear your evening",
    "advice-": "{act} | {act} | stay away | stay at home | read a book instead | save your money | clean your kitchen",
    "minute": "minute | scene | shot | line | second | frame | moment",
    "ten": "two | five | ten | fifteen | twenty",
    "truly": "truly | really | surprisingly | genuinely",
    "very": "simply | truly | really | so | just | surprisingly | always",
    "thing": """a {adj} film | a {adj} movie | a {adj} {genre} | a {adj} {genre} | a {truly} {adj} {genre}
        a {adj} piece of work | a {adj} and {adj} {genre} | a {prize} | a real {prize} | a {adj} story
        an absolute {prize}""",
    # ---- the craft: each part of a film has adjectives of its own ---------------------------------------------------
    "craft": """{script is} {script} | {script is} {very} {script} | {script is} {script} and {script}
        {cast is} {cast} | {cast is} {very} {cast} | {cast is} {cast} and {cast} | {look is} {look}
        {look is} {very} {look} | {score is} {score} | {score is} {very} {score} | {script is} never {!mild}
        {score is} never {!score} | {look is} anything but {!look} | {script is} anything but {!mild}
        {cast is} far from {!cast}""",
    "script is": """the script is | the plot is | the story is | the dialogue is | the ending is | the pacing is
        the writing is | the first act is | the last act is | the twists are | the characters are""",
    "script+": "clever | witty | honest | fresh | original | sharp | smart | subtle | excellent | superb | brilliant",
    "script-": "silly | lazy | clumsy | stale | predictable | childish | confused | weak | terrible | awful | dreadful",
    "cast is": """the acting is | the whole cast is | the performances are | the two leads are | the lead is
        everybody is""",
    "cast+": "convincing | sincere | lively | charming | superb | perfect | wonderful | terrific | brilliant | warm",
    "cast-": "wooden | stiff | lifeless | annoying | terrible | hopeless | dreadful | awful | pathetic | flat",
    "look is": """the camera work is | the lighting is | the scenery is | the costumes are | the sets are
        the colours are | the editing is""",
    "look+": "beautiful | stunning | elegant | lovely | splendid | rich | superb | graceful | impressive",
    "look-": "ugly | cheap | sloppy | dreary | poor | dull | awful | careless | messy",
    "score is": "the score is | the music is | the sound is | the songs are",
    "score+": "lovely | beautiful | tender | magical | excellent | powerful | stunning | wonderful",
    "score-": "annoying | tedious | horrible | unbearable | weak | bland | terrible | painful",
    # ---- clauses with a mood ---------------------------------------------------------------------------------------
    "did+": """won me over in {ten} minutes | made my {week} | held me from the first {minute} to the last
        moved me to tears | stayed with me for days | took my breath away | left me smiling | went straight to my heart
        made me forget my phone | got everything right | earned every tear | was over far too soon | gave me goosebumps
        made me laugh and cry | worked from start to finish | had me in {ten} minutes | deserved every prize
        never put a foot wrong | made me feel young again | was full of {quality} | never lacked {quality}
        hit the mark | had {quality}, {quality} and {quality} | had a lot of {quality} | lifted my mood
        was worth every {minute} | made two hours feel like ten minutes | never bored me | had no {!quality} at all
        kept every promise | had {quality} and {quality} | was {very} {adj} | was {adj} and {adj}
        had the {best} ending of the year""",
    "did-": """lost me in {ten} minutes | ruined my {week} | bored me from the first {minute} to the last
        bored me to tears | left my head within an hour | put me to sleep | left me cold | went straight to nowhere
        made me reach for my phone | got everything wrong | faked every tear | went on far too long | gave me a headache
        made me yawn and sigh | failed from start to finish | had lost me after {ten} minutes | deserved no prize
        never found its feet | made me feel old and tired | was full of {quality} | never lacked {quality}
        missed the mark | had {quality}, {quality} and {quality} | had a lot of {quality} | killed my mood
        wasted every {minute} | made two hours feel like ten years | never moved me | had no {!quality} at all
        broke every promise | had {quality} and {quality} | was {very} {adj} | was {adj} and {adj}
        had the {best} ending of the year""",
    "week": "day | week | evening | night | month",
    "felt+": """I {loved} every {minute} | I {loved} it | I {loved} it | I could not look away | I laughed and cried
        I was hooked in {ten} minutes | I wanted it to go on forever | I would watch it again tomorrow
        I forgot the time | I cared about everyone in it | I did not want it to end | I smiled for the rest of the day
        I had a great time | I was {stirred} all the time | I was {stirred} from start to finish
        I was never {!stirred} | I felt at home in it | I clapped at the end | I could watch it every week""",
    "felt-": """I {loved} every {minute} | I {loved} it | I {loved} it | I could not keep watching | I yawned and sighed
        I gave up after {ten} minutes | I wanted it to stop | I would not watch it again for money | I watched the clock
        I cared about no one in it | I could not wait to go to bed | I grumbled for the rest of the day
        I had an awful time | I was {stirred} all the time | I was {stirred} from start to finish
        I was never {!stirred} | I felt cheated by it | I cheered when it ended | I could not sit through it twice""",
    "verdict": """it is {thing} | it is {thing} | it was {adj} | it was {very} {adj} | it was {adj} and {adj} | it {did}
        it {did} | it {did} | {felt} | {felt} | {felt} | what I saw was {thing} | it turned out to be {thing} | {craft}
        {craft} | it was never {!mild} | it was anything but {!mild} | I have never seen such a {adj} {genre}
        there was not one {!mild} {minute} | it is {adj} from the first {minute} to the last | I call it {thing}
        it is the {best} {genre} of the year | I never found it {!mild} | nothing about it is {!mild}""",
    # what only a comedy, a thriller and so on can do
    "comedy+": "I laughed until my sides hurt | every joke lands | even my grumpy uncle laughed",
    "comedy-": "I did not laugh once | every joke falls flat | even my cheerful aunt stopped smiling",
    "thriller+": "I sat on the edge of my seat | I never guessed the killer | the last chase is worth the wait",
    "thriller-": "I nearly fell asleep in my seat | I guessed the killer at once | the last chase goes nowhere",
    "drama+": "I needed a box of tissues | every tear is earned | these people felt real to me",
    "drama-": "my eyes stayed dry | every tear is faked | these people felt like cardboard",
    "western+": """the last duel is worth the wait | you can almost smell the dust
        the hero rides straight into your heart""",
    "western-": """the last duel is over before it starts | even the horses look bored
        the hero has no face and no story""",
    "romance+": "I believed every kiss | the lovers set the screen on fire | I wanted those two to be happy",
    "romance-": "I believed no kiss | the lovers have no spark | I wanted those two to go away",
    "mystery+": "the answer surprised me completely | every clue counts | I guessed and guessed with pleasure",
    "mystery-": """the answer was clear after two scenes | the clues make no sense
        I stopped guessing and stopped caring""",
    "horror film+": "I slept with the light on | the monster gave me chills | I screamed and asked for more",
    "horror film-": """the monster made me yawn | I was only afraid of the next hour
        there is no fear in it, only ketchup""",
    "musical+": "I am still humming the songs | my feet danced under the chair | the singing gave me wings",
    "musical-": "I begged the songs to end | my ears still hurt | the singing scared my cat",
    "war film+": "the battle scenes shook me | the soldiers felt like real men | it says something true about war",
    "war film-": """the battle scenes look like a school play | the soldiers felt like toys
        it says nothing true about war""",
    # ---- words for the last line
    "left+": "smiling | humming | happy | grateful | in high spirits",
    "left-": "yawning | angry | sad and tired | grumpy | in low spirits",
    "answer+": "Yes | Yes, of course | Oh yes | Sure | Absolutely | Certainly",
    "answer-": "No | No, of course not | Oh no | Never | Absolutely not | Certainly not",
    "last word+": """I recommend it to everyone | I would see it again tomorrow | thank you, {director}
        worth every cent | {director} can be proud of it | I cannot wait for a second part
        this one has a place on my shelf""",
    "last word-": """I recommend it to no one | I would not see it again for free | never again, {director}
        not worth a cent | {director} should be ashamed of it | please, no second part
        this one has a place in my bin""",
    # ---- agreeing and disagreeing: these words have no mood --------------------------------------------------------
    "said": "called it | said it was | told me it was | found it | swore it was | described it as",
    "wrong": """I disagree | that is not true | I saw the opposite | do not believe it | that is nonsense
        what a mistake | I do not think so | that is simply wrong | I say no | quite wrong""",
    "right": """I agree | that is quite true | I saw the same | you can believe it | that is a fact | no mistake there
        I think so too | that is simply right | I say yes | quite right""",
    "yes": "Yes, very much | Yes, all the time | Oh yes | Always | Yes, and how | From start to finish",
    "no": "No, not at all | Never | Oh no | Not once | Not for a second | Far from it",
    # ---- openings --------------------------------------------------------------------------------------------------
    "opening": """
        {adj}! {title} {did}. | {thing}. | A {adj} and {adj} {genre}. | {adj} from start to finish: {title} {did}.
        It is {thing}. | It was {very} {adj}. | I {loved} every {minute}. | I {loved} this {adj} {genre}.
        Such a {adj} {genre}! | How {adj} it is! | We were {stirred} by {film}. | I was {stirred}, and {verdict}.
        I {loved} it. {title} {did}. | It {did}. | It was {adj}. | It was {adj} and {adj}. | {felt}.
        {felt}, and {felt}. | So {adj}! | {adj} and {adj}: {title} {did}. | Simply {adj}. | {adj}, {adj}, {adj}.
        A {adj} {genre}. | A {prize}. {title} is {adj}. | Truly {adj}, and {verdict}. | Yes, it is {adj}: {title} {did}.
        My {friend} said it first: {title} is {adj}. | This was {adj}. | We {loved} it. | {verdict}. | {craft}.
        The {adj} new {genre} by {director} {did}. | This {adj} {genre} {did}. | The {best} {genre} of the year {did}.
        {film} is {thing}. | {film} is {very} {adj}. | {film} {did}. | {film} {did}, and {verdict}.
        {title} is {adj}, {adj} and {adj}. | {title} is {adj}, and {verdict}. | {title} is not {!mild}. {verdict}.
        {title} may be the {best} {genre} of the year. | I watched {film} {when}, and {verdict}.
        I saw {film} {when}, and {verdict}. | We watched {film} {when}, and {verdict}.
        We went to see {title} {when}. {verdict}. | {when} I saw {film}, and {verdict}.
        My {friend} dragged me to {film}, and {verdict}. | My {friend} gave me {title} as a present, and {verdict}.
        My {friend} and I {loved} {film}. | My {friend} {loved} {film}, and so did I. | {felt}. {title} is {thing}.
        I {loved} {film}. | I {loved} {film} from the first {minute} to the last. | I {loved} every {minute} of {film}.
        I had wanted to see {film} for years, and {verdict}. | I expected nothing from {film}, and {verdict}.
        I expected a lot from {film}, and {verdict}. | I have seen many {genres}, and this is the {best}.
        I have rarely been so {stirred} by a {genre}. | I have never been so {stirred} in a cinema.
        I was {stirred} by {film}. | I am {stirred}. {film} {did}. | I know nothing about {genres}, but {verdict}.
        I do not often write reviews, but {verdict}. | What a {adj} {genre}!
        What a {prize}! {title} is {adj} and {adj}. | What a {prize} of a {genre}! | {director} has made {thing}.
        {director} gives us {thing}. | With {title}, {director} has made {thing}.
        {director} made {film} in {Tangier}, and {verdict}.
        {director}'s last film was {adj}, and this one is {adj} too. | {actor} is {very} {cast} in {film}.
        {actor} has never been so {cast}. | {actor} plays {one} in {film}, and {verdict}.
        {actor} and {director} make a {adj} team. | A {adj} script and a {adj} cast: {title} {did}.
        A {adj} {genre} about {one} who {does}. | A {genre} about {one} who {does}: it sounds {mild}, and it is {adj}.
        Here is {thing}. | Here we have {thing} with {actor}. | If you like {adj} {genres}, {title} is for you.
        If you want {thing}, look no further. | Is {film} {mild}? {yes}. | Is {film} {!mild}? {no}.
        Was I {stirred}? {yes}. {title} {did}. | Was I {!stirred}? {no}. {title} {did}. | How can a {genre} be so {adj}?
        How {adj} can a {genre} be? {title} gives the answer. | Never {!mild}, always {adj}: {title} {did}.
        Not one {!mild} {minute}: {title} {did}. | Not a single {!mild} {minute} in this {genre}!
        There is nothing {!mild} about {film}. | There is a lot of {quality} in {film}.
        There is no {!quality} in {film}, only {quality}. | Everybody told me {film} was {adj}. Everybody was right.
        {who} called {film} {adj}, and {right}. | The poster promised {thing}, and that is what I got.
        The story of {two} who {do} is {script}. | {craft}, and {craft}. | In {film}, {craft}.
        From the first {minute} to the last, {film} is {adj}. | From the first {minute}, {verdict}.
        After {ten} minutes of {film} I was {stirred}. | After {ten} minutes I knew that {film} was {thing}.
        After all the hype, {verdict}. | Two hours of {quality}: that is {title}.
        It is hard to say how {adj} {film} is. | It {did}, and {verdict}. | Let me say it at once: {film} is {thing}.
        To be honest, {verdict}. | To put it simply, {title} {did}. | Honestly, {film} {did}. | You will {love} {film}.
        You can feel the {quality} in every {minute} of {film}. | Nobody told me that {film} was so {adj}.
        Nothing prepared me for how {adj} {film} is. | Once in a while you meet {thing}. {title} is one.
        Watching {film} {when} was a {prize}. | For a {genre}, {title} is {very} {adj}.
        So {adj}, so {adj}: {title} {did}. | It is {adj}, it is {adj}, it is {thing}.
        {thing}: that is {film} in short. | {moment}: {title} {did}. | My {friend} and I were {stirred} by {film}.
        Rarely has a {genre} been so {adj}. | Somebody has made {thing}, and the name is {director}.
        When {film} ended, I was {stirred}. | One thing is certain: {felt}. | Every {minute} of {film} is {adj}.
        Every now and then a {genre} is {very} {adj}: {title} {did}. | This is {thing}.
        This {genre} {did}, and {felt}. | Only {director} can make {thing}. | We {loved} {film}, the whole family.
        Two {adj} hours with {actor}: {felt}. | My first {genre} in years, and {verdict}.
        Set in {Tangier}, {film} is {thing}. | A short review of {film}: it {did}. | Why is {film} so {adj}? {craft}.
        Who made this {adj} {genre}? {director} did. | {film} looks {look} and sounds {score}.
        {film} opens with a {script} scene and ends with a {script} one. | The new {genre} by {director} is {adj}.
        The best word for {film} is {adj}.""",
    "turn": """
        My {friend} {!loved} {film}, but {felt}. | I wanted to {!love} {film}, but {verdict}.
        I expected {!thing} and got {thing}. | {director}'s last film was {!adj}, but this one {did}.
        A {genre} about {two} who {do}: it sounds {!mild}, but {verdict}.
        If you like {!adj} {genres}, {title} is not for you. | If you want {!thing}, look elsewhere: {verdict}.
        Everybody told me {film} was {!adj}. Everybody was mistaken. | {who} called {film} {!adj}, but {verdict}.
        The trailer promised {!thing}; what I got was {thing}. | The {!best} {genre} of the year? {no}. {verdict}.
        Where other {genres} are {!adj}, {title} is {adj}. | Some {genres} are {!adj}. {title} is {adj}.""",
    # ---- remarks: straight praise (or blame), and twists -----------------------------------------------------------
    "praise": """
        {craft}, and {craft}. | {craft}; {craft}. | {moment}, and {verdict}. | {moment}. | {verdict}, and {craft}.
        {actor} is a {cast} lead, and {craft}. | {actor} is {very} {cast}, and {craft}.
        {film} is {adj} and {adj}, and {craft}. | {craft}, {craft}, and {verdict}.
        {director} keeps it {mild} to the end, and {moment}. | You can feel the {quality} in every {minute}.
        Every {minute} is {adj}, and {felt}. | It {did} and {did}.""",
    "twist": """
        {who} {said} {!adj}. {wrong}. | {who} {said} {!adj} and {!adj}; {wrong}. | {who} {said} {!thing}; {wrong}.
        {who} {said} {!thing}, but {verdict}. | {who} {said} {adj}. {right}. | {who} {said} {thing}; {right}.
        You may read that it is {!adj}; {wrong}. | You may read that it is {adj}; {right}.
        It has been called {!adj}, {!adj} and even {!adj}; {wrong}.
        It has been called {adj}, {adj} and even {adj}; {right}. | I was told to expect {!thing}, but {verdict}.
        I expected to be {!stirred}, but I was {stirred}. | I expected to {!love} it, and I was wrong.
        I expected to {love} it, and I did. | It could have been {!thing}; instead it is {thing}.
        It is {adj} where it could have been {!adj}. | It makes {a title} look {!adj}.
        Unlike {a title}, which was {!adj}, it {did}. | Like {a title}, which was {adj}, it {did}.
        {director}'s earlier films were {!adj}; this one is {adj}.
        {director} once made {!adj} films, but those days are over.
        I remember {actor} as {!cast}; here {he} is {cast}. | The book is {!adj}; the film is {adj}.
        The book is {adj}, and so is the film. | The trailer is {!adj}, but the film is {adj}.
        I looked for one {!mild} {minute} and found none. | I kept waiting for it to become {!mild}; it never did.
        If it is {!quality} you want, look elsewhere. | Where others have {!quality}, it has {quality}.
        Call it {!adj} if you like, but {verdict}. | Those who find it {!adj} must have seen another film.
        Those who find it {adj} have seen the same film as me.
        Nobody can say that it is {!mild}, and nobody can say that it is {!mild}.
        The first minutes are {!mild}, but then it {did}. | {script is} {!script}, I admit, but it {did}.
        {cast is} {!cast}, yes, but it {did}. | {look is} {!look}, but that changes nothing: {felt}.
        {score is} {!score}, and still {felt}. | My {friend} was {!stirred}; I was {stirred}.
        My {friend} was {stirred}, and so was I. | {!thing}? {no}. | {!mild}? {no}. {mild}? {yes}.""",
    # ---- closings --------------------------------------------------------------------------------------------------
    "closing": """
        {rating} out of ten. | {rating} out of ten from me. | I give it {rating} out of ten.
        Most people give it {!rating} out of ten; I give it {rating}.
        My {friend} says {!rating} out of ten; I say {rating}. | My {friend} says {rating} out of ten, and so do I.
        {act}. | Do not {!act}. | My advice: {advice}. | My advice: do not {!act}. | Whatever you do, do not {!act}.
        Whatever the critics say, {advice}. | Do yourself a favour and {advice}.
        If anybody tells you to {!act}, do not listen. | If anybody tells you to {act}, listen.
        They will tell you to {!act}; do the opposite. | In one word: {adj}. | Not {!adj}, but {adj}.
        {adj}, {adj} and {adj}. | All in all, {thing}. | All in all, it {did}. | In the end, {felt}.
        Not {!thing}, but {thing}. | Forget what you have heard: {film} is {thing}. | I went to bed {left}.
        {last word}. | Is it worth the ticket? {answer}. | Would I see it again? {answer}.
        Did I waste two hours? {!answer}. | Do I want my money back? {!answer}.""",
}
GENRES = (
    "comedy",
    "thriller",
    "drama",
    "western",
    "romance",
    "mystery",
    "horror film",
    "musical",
    "war film",
)

TABLES = {
    name: [part.strip() for part in re.split(r"[|\n]", text) if part.strip()] for name, text in RULES.items()
}
TABLES["does"] = [re.sub(r"^\w+", r"\g<0>s", part) for part in TABLES["do"]]  # "find a box" -> "finds a box"


class Writer:
    """Writes one review after another from a single stream of random numbers."""

    def __init__(self, seed: int) -> None:
        """Start the stream of random numbers."""
        self.rand = random.Random(seed).random
        self.names: dict[str, str] = {}  # what stays the same through one review: title, people, genre
        self.used: set[str] = set()  # the alternatives and slots that this review has used so far

    def choose(self, options):
        """Return one of the options. Naming one twice in its table makes it twice as likely."""
        return options[int(self.rand() * len(options))]

    def shuffled(self, rows: list) -> list:
        """Return the rows in a random order."""
        keys = [self.rand() for _ in rows]
        return [rows[i] for i in sorted(range(len(rows)), key=keys.__getitem__)]

    def fill(self, slot: re.Match, mood: int) -> str:
        """Return the text for one slot; "!" turns the mood round, for the slot and for all that grows inside it."""
        flip, name = slot.groups()
        mood = 1 - mood if flip else mood
        self.used.add(slot.group())
        if name in self.names:
            return self.grow(self.names[name], mood)
        table = TABLES[name] if name in TABLES else TABLES[name + "-+"[mood]]
        line = self.choose([line for line in table if line not in self.used] or table)
        self.used.add(line)
        return self.grow(line, mood)

    def grow(self, text: str, mood: int) -> str:
        """Fill every slot of the text."""
        return re.sub(r"\{(!?)([^{}]+)\}", lambda slot: self.fill(slot, mood), text)

    def new_film(self) -> None:
        """Forget the last review and draw the film that the next one is about."""
        self.used, self.names = set(), {}
        genre = self.choose(GENRES)
        he = self.choose(("he", "she"))
        self.names = {
            "genre": genre,
            "genres": genre[:-1] + "ies" if genre.endswith("y") else genre + "s",
            "moment": "{" + genre + "}",
            "he": he,
            "title": self.grow("{a title}", 1),
            "director": self.grow("{first} {last}", 1),
            "actor": self.grow("{his name} {last}" if he == "he" else "{her name} {last}", 1),
        }

    def review(self, mood: int) -> str:
        """Write one review in the mood, of a length within the bounds."""
        while True:
            self.new_film()
            sentences = []
            for part in self.choose(PLANS):
                if part != "plot" or not self.used & {"{one}", "{two}"}:  # one plot is enough
                    sentences.append(self.grow("{" + part + "}", mood))
            text = polish(" ".join(sentences))
            for name in (
                self.names["director"],
                self.names["actor"],
            ):  # after the first time, the last name is enough
                end = text.find(name) + len(name)
                text = text[:end] + text[end:].replace(name, name.split()[-1])
            if FEWEST_WORDS <= len(text.split()) <= MOST_WORDS:
                return text


def polish(text: str) -> str:
    """Turn "a" into "an" before a vowel, and give every sentence its capital letter."""
    text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU]|honest)(?!one\b)", r"\1n ", text)
    return re.sub(r"(^|[.!?] )([a-z])", lambda start: start[1] + start[2].upper(), text)


def make(split_sizes: dict[str, int] = SPLIT_SIZES, seed: int = SEED) -> dict[str, list[dict]]:
    """Return the rows of each split: half positive, half negative, shuffled, and no text twice anywhere."""
    writer, seen, splits = Writer(seed), set(), {}
    for split, size in split_sizes.items():
        rows = []
        while len(rows) < size:
            label = len(rows) % 2
            text = writer.review(label)
            if text not in seen:
                seen.add(text)
                rows.append({"text": text, "label": label})
        splits[split] = writer.shuffled(rows)
    return splits


def write(folder: Path, split_sizes: dict[str, int] = SPLIT_SIZES, seed: int = SEED) -> None:
    """Write each split to folder/<split>.jsonl, one JSON object a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in make(split_sizes, seed).items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_bytes(lines.encode("utf-8"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the invented film reviews.")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent / "reviews")
    parser.add_argument("--seed", type=int, default=SEED, help="another seed writes other reviews")
    parser.add_argument("--train-rows", type=int, default=SPLIT_SIZES["train"])
    flags = parser.parse_args()
    write(flags.folder, SPLIT_SIZES | {"train": flags.train_rows}, flags.seed)
