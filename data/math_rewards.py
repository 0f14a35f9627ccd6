"""Rewards for mathematics that a program can check, for grpo_math.py and for TRL's GRPOTrainer.

By default, grpo_math.py runs the code of this file: its reward is `correct`.

    correct        the final answer is the one in the column `answer` (data/arithmetic, gsm8k)
    well_formed    the completion ends with one number in <answer> tags, whatever that number is
    shows_work     the completion has several lines with an equals sign, right or wrong
    countdown      the equation uses each of `nums` once and makes `target` (Jiayi-Pan/Countdown-Tasks-3to4)

All have TRL's signature: the completions, and the columns of the data set as keyword arguments with one
entry per completion. They return one float per completion, from 0.0 to 1.0. A completion is a str, or a list
of messages, of which the last one counts.

Completions are untrusted text: they are never passed to eval(), none takes long, and none raises an
exception. Columns of the data may: one that is not as long as the list of completions, and a row without an
answer that a completion could give, raise an error.

well_formed and shows_work can be hacked: "<answer>7</answer>" always earns the first. Use them together with
correct, and with a small weight.
"""

import ast
import math
import re
import unicodedata
from fractions import Fraction

OPENING, CLOSING = "<answer>", "</answer>"
MOST_CHARACTERS = 200  # of a number or an equation; longer texts are neither


# ---- Completions -------------------------------------------------------------------------------------------


def text_of(completion):
    """The text of a completion: itself, or the content of its last message. -> str"""
    if isinstance(completion, str):
        return completion
    if not completion:
        return ""
    return completion[-1].get("content") or ""


def tagged_answer(text):
    """What is in the last <answer>...</answer>, or None. -> str or None

    A regular expression with .*? would take quadratic time for a text that only repeats <answer>.
    """
    before, _, _ = text.rpartition(CLOSING)  # "" if there is no closing tag
    _, opening, inside = before.rpartition(OPENING)
    if not opening:
        return None
    return inside.partition(CLOSING)[0]


def boxed_answer(text):
    r"""What is in the last \boxed{...} or \fbox{...}, nested braces included, or None. -> str or None

    The last box is the one that begins last, so of two nested boxes it is the inner one. A box that is never
    closed does not count.
    """
    starts = []  # of the contents of all braces that are open
    last_start, last_end = -1, -1
    for brace in re.finditer(r"[{}]", text):
        if brace.group() == "{":
            starts.append(brace.end())
        elif starts:
            start = starts.pop()
            if start > last_start and text.endswith((r"\boxed{", r"\boxed {", r"\fbox{"), 0, start):
                last_start, last_end = start, brace.start()
    if last_start == -1:
        return None
    return text[last_start:last_end]


def final_answer(text):
    r"""The final answer of a text, or None if it has none. -> str or None

    It is in the last <answer>...</answer>, or else in the last \boxed{...}, or else after the last ####. If
    the tags contain a box, it is in the last box there.
    """
    answer = tagged_answer(text)
    box = boxed_answer(text if answer is None else answer)
    if box is not None:
        answer = box
    if answer is None and "####" in text:
        answer = after_hashes(text)
    return answer


def after_hashes(text):
    """The line after the last ####. -> str"""
    _, _, rest = text.rpartition("####")
    line, _, _ = rest.strip().partition("\n")
    return line


# What JSON makes of a single backslash: "\frac" is a form feed and "rac", "\text" a tab and "ext".
LOST_BACKSLASH = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]|[\t\r](?=[a-z])|\n(?=eq\b)")


def reference_answer(reference):
    r"""The answer in a reference, or None if no completion can equal it. -> str or None

    A reference is an answer (72, "72", ["72"]) or a whole solution, of which only the final answer counts.
    None: null, nan, an empty text, several answers, a box that is never closed, a lost backslash.
    """
    if isinstance(reference, list) and len(reference) == 1:
        reference = reference[0]
    is_number = isinstance(reference, (int, float)) and math.isfinite(reference)
    if not is_number and not isinstance(reference, str):
        return None
    text = str(reference)
    answer = final_answer(text)
    if answer is None:
        boxes = re.findall(r"\\boxed +([^ {$\n][^$\n]*)", text)  # MATH also has "$x = \boxed 5$"
        answer = boxes[-1] if boxes else text
    if not plain(answer) or r"\boxed" in answer or LOST_BACKSLASH.search(answer):
        return None
    return answer


# ---- Numbers -----------------------------------------------------------------------------------------------


def plain(text):
    r"""The text without $ and % (in LaTeX \$ and \%), a final period and the spaces around it. -> str"""
    text = re.sub(r"(\b(A|C|R|HK|NT|NZ|US)(?=\\?\$ ?[0-9]))?\\?[$%]", "", text)  # R$ 72
    return re.sub(r"(?<!\.)[.\u3002\u0964]\Z", "", text.strip()).strip()  # also in Chinese and Hindi


def without_commas(text):
    """The text without the commas, or apostrophes, that separate thousands. -> str"""
    return re.sub(r"(?<=[0-9])[,'\u2019](?=[0-9]{3}(?![0-9]))", "", text)


def as_number(text):
    """The exact value of "72", "-0.5", "1,234" or "3/4"; None for other texts. -> Fraction or None"""
    text = plain(text)
    if len(text) > MOST_CHARACTERS:
        return None
    text = without_commas(text)
    if not re.fullmatch(r"[+-]?([0-9]+|[0-9]*\.[0-9]+|[0-9]+/[0-9]+)", text):
        return None
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return None


# ---- Numbers with units, LaTeX and Unicode -----------------------------------------------------------------

# A letter of any script, and the marks that belong to letters of Indian scripts, Thai and Lao.
LETTER = r"[^\W\d_\u0900-\u0eff]|[\u0900-\u0eff]"

# Units of one or two letters, and units of three letters that may follow a number without a space. Other short
# words are variables: 2x, 3ab, 2xyz.
SHORT_UNITS = frozenset(
    """
    A C F J L N V W g h l m s cm dm ft hr in kg km lb mi mg ml mL mm of oz sq yd Hz kW kJ Rs US
    min sec hrs lbs mph kph rpm kWh USD EUR GBP kr zł Kč Ft đô
    м г с ч л т р μm μg
    """.split()
)

# Words that change the number or reject it. Their plurals in -s count, too.
OTHER_NUMBER = frozenset(
    """
    and or but no not never neither nor none except without wrong incorrect false unless versus
    than least most between above below under over almost nearly before after
    minus plus negative squared cubed factorial mod modulo choose sqrt root log exp ln sin cos tan cot sinh cosh
    tanh arcsin arccos arctan gcd lcm floor ceil abs
    twice double triple half halves third fourth fifth sixth seventh eighth ninth tenth hundredth thousandth
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
    dozen hundred thousand million billion trillion
    """.split()
)

# Words that multiply the number before them: 72 crore. In front of it, they do not: "The score is 72".
FACTORS = frozenset(
    """
    lakh lac crore mil mill mln mio bil bln mrd grand gross score myriad quadrillion quintillion sextillion
    googol eleventh twelfth fifteenth sixteenth twentieth fiftieth millionth billionth
    """.split()
)

# The same in other languages, with words for half, more, less, at least. These must match a whole word.
OTHER_FACTORS = frozenset(
    unicodedata.normalize(
        "NFKC",
        """
    millón millones milhão milhões milioni milione millions mille millier milliers milliard milliards mila
    tausend hundert million millionen milliarde milliarden cien ciento cientos docena docenas douzaine dutzend
    mitad moitié hälfte medio media demi tercio drittel menos moins weniger más mehr mais plus bin milyon milyar
    yüz yarım nghìn ngàn triệu tỷ tỉ trăm duizend miljoen miljoner tusen tusind tuhat tuhatta miljoonaa ezer millió
    tysiąc tysiące tysięcy milionów tisíc tisíce milionů milión mii milioane ribu juta libo elfu
    не или нет ألف آلاف الف مليون ملايين مليار مئة مائة نصف هزار میلیون ہزار لاکھ کروڑ אלף אלפים מיליון
    हज़ार हजार लाख करोड़ सौ आधा হাজার লাখ লক্ষ কোটি ஆயிரம் லட்சம் கோடி వేలు వేల లక్షల
    반 이상 이하 미만 초과
    """,
    ).split()
)

# These match the beginning of a word: its end changes with the case or, in Thai, the next word follows directly.
FACTOR_STEMS = tuple(
    """
    тыс тис млн млрд миллион миллиард мільйон милион хиляд сотен сотн десятк дюжин половин трет четверт больше
    меньше более менее χιλιάδ εκατομμ εκατοντ พัน หมื่น แสน ล้าน ร้อย ครึ่ง
    """.split()
)
KOREAN_FACTOR = re.compile("[만억조천백십]+여?(원|명|개|년|달러)?")  # 만원
# Units, and shapes, whose numeral is a part of their name: a kilometer, a percentage point, a triangle
HAN_UNITS = re.compile("千[米克瓦卡]|百分点|[三四五六七八多][角边]形")
HAN_FACTORS = (
    "半余餘多以未超近不非无無没或和与跟及约倍打"  # in addition to those that have a numeric value: 万
)

# Words that may stand before a number, in addition to SHORT_UNITS. Others may be functions: csc 2, square 3.
WORDS_BEFORE = frozenset(
    """
    about approximately approx around roughly exactly only dollars euros rupees rmb cny jpy inr chf aud cad kr
    共 一共 总共 共有 人民币
    """.split()
)

PLAIN_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2010\u2012\u2013\u2014\u2015\u2212", "-")  # hyphen, dashes, minus
    | dict.fromkeys("\u00d7\u00b7\u22c5", "*")  # times, middle dot, dot operator
    | dict.fromkeys("\u2044\u2215", "/")  # fraction slash, division slash
    | {"\u2248": "="}  # almost equal
    | {"\u221e": r"\infty", "\u03c0": r"\pi", "\u222a": r"\cup"}
    | dict.fromkeys("\u20ac\u00a3\u00a5\u20b9\u00b0")  # removed like $ and %: euro, pound, yen, rupee, degree
    | dict.fromkeys("\u00a2\u066a")  # cent, Arabic percent
    | {"\u066b": ".", "\u066c": ","}  # Arabic separators of decimals and of thousands
    | dict.fromkeys("\u20a9\u20aa\u20ab\u20b1\u20b4\u20ba\u20bd\u0e3f")  # won, shekel, dong, peso, and so on
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff")  # removed: characters of zero width
)

STYLED = re.compile(
    r"\\(text(bf|it|rm|sf|tt|normal)?|math(bf|it|rm|sf|tt)|bm|boldsymbol|operatorname|underline|[fm]box|boxed)"
    r"\s*\{(?P<inside>[^{}]*)\}"
)
NUMBER_IN_BRACES = r"(?:\{\s*([+-]?[0-9.,]+)\s*\}|([0-9]))"
PLAIN_LATEX = [  # (pattern, replacement), in this order
    (r"\A(\*\*|`)(.*)\1\Z", r"\2"),  # Markdown
    (r"\\! ?|\\(left|right|displaystyle)(?![A-Za-z])", ""),
    (r"\\\\", ";"),  # the end of a row of a matrix
    (r"\{bmatrix\}", "{pmatrix}"),
    (r"\^\\circ(?![A-Za-z])|\^\{\\circ\}|\\degree(?![A-Za-z])", ""),
    (r"\\[,;: ]|\\[()\[\]]|~", " "),
    (r"\\(times|cdot)(?![A-Za-z])", "*"),
    (r"\\approx(?![A-Za-z])", "="),
    (r"\{,\}", ","),
    (r"([_^])\{([+-]?[0-9]+|[A-Za-z])\}", r"\1\2 "),
    (r"\\[cdt]frac(?![A-Za-z])", r"\\frac"),
    (rf"\\frac\s*{NUMBER_IN_BRACES}\s*{NUMBER_IN_BRACES}", r" \1\2/\3\4 "),
    (r"[ \t]+", " "),
    (r" (?![^\W_]|[.,])|(?<![^\W_])(?<![.,\u0900-\u0eff]) ", ""),  # beside signs and brackets
]

DECIMAL = r"(?:(?:[0-9]{1,3}(?:[ ][0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
QUANTITY = re.compile(
    rf"""
    (?:  # x =, The answer is
        (?P<name> (?:{LETTER}|[\\() ])* (?:_[A-Za-z0-9])?)
        (?:=|:|:=|\b(?:is|are|es|est|ist)\b|(?<=答案)[是为]) [ ]?
    )?
    (?: (?P<before>[A-Za-z]{{2,}}|[\u4e00-\u9fff]+) \.?[ ]? )?  # USD, Rs., or about
    (?P<sign> [+-]? )
    (?: (?P<whole>[0-9]+) [ ] (?=[0-9]+/) )?  # the first 1 of 1 1/2
    (?P<top> {DECIMAL} )
    (?: / (?P<bottom>[+-]?{DECIMAL}) )?
    (?: [eE] (?P<exponent>[+-]?[0-9]{{1,3}}) )?
    (?P<unit> [ ]?/?[ ]? (?:{LETTER}|\() (?: {LETTER} | [ ()'./*-] | (?:(?<=[^\W\d_])|(?<=\)))\^-?[0-9] )* )?
    """,
    re.VERBOSE,
)


def simplified(text):
    r"""The text as typed on a keyboard, without LaTeX that only affects its appearance. -> str

    "72\,\text{ cm}^2" becomes "72 cm^2", "\left(\dfrac{3}{4}\right)" becomes "3/4". A text longer than
    MOST_CHARACTERS keeps its LaTeX.
    """
    text = plain(text)
    if len(text) > MOST_CHARACTERS:
        return text
    text = typed(text)
    if r"\begin" not in text:  # outside of a matrix, two backslashes are one that was escaped twice
        text = text.replace(r"\\", "\\")
    text = without_styles(plain(text))
    for pattern, replacement in PLAIN_LATEX:
        text = re.sub(pattern, replacement, text.strip())
    return plain(without_outer_brackets(text))


def typed(text):
    """The text with Unicode digits, spaces, dashes, exponents and fractions converted to ASCII. -> str"""
    text = re.sub("[\u00ba\u02da]", "\u00b0", text)  # look-alikes of the degree sign
    text = re.sub("[\u00bc-\u00be\u2150-\u215e]", r" \g<0> ", text)  # so that 1 and 1/2 does not become 11/2
    text = re.sub(
        "\u207b?[\u00b9\u00b2\u00b3\u2070-\u2079]+", r"^\g<0>", text
    )  # so that 5^2 does not become 52
    text = re.sub("[\u33a0-\u33a6]", square_or_cubic, text)
    text = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), text)  # of any script
    return unicodedata.normalize("NFKC", text).translate(PLAIN_CHARACTERS)


def square_or_cubic(match):
    """The unit that one character stands for: "m^2". -> str"""
    letters = unicodedata.normalize("NFKC", match[0])
    return f"{letters[:-1]}^{letters[-1]}"


def without_styles(text):
    r"""The text without \text{...}, \mathbf{...} and the like around its parts. -> str"""
    changes = 1
    while changes:
        text, changes = STYLED.subn(r" \g<inside>", text)
    return text


def without_outer_brackets(text):
    """The text without the ( ) or { } that enclose it; (3, 4) keeps them. -> str"""
    while match := re.fullmatch(r"\(([^(),]*)\)|\{([^{}]*)\}", text.strip()):
        text = match[1] or match[2] or ""
    return text


def as_quantity(text):
    """The value, name and unit of a simplified text; None if it is not exactly one number. -> tuple or None

    "x = 1,200 cm^2" has (1200, "x", "cm^2"). None: "72 or 73", "72 of 100", "72 thousand", "2x".
    """
    if len(text) > MOST_CHARACTERS:
        return None
    text = without_commas(text)
    text = re.sub(r"(?<=[0-9]) ?[*x] ?10\^(?=[+-]?[0-9])", "e", text)  # 1.2*10^3
    text = re.sub(r"(?<![0-9.])10\^(?=[+-]?[0-9])", "1e", text)
    match = QUANTITY.fullmatch(text)
    if match is None:
        return None
    name, before, unit = [match[group] or "" for group in ("name", "before", "unit")]
    if before and before.lower() not in WORDS_BEFORE and before not in SHORT_UNITS:
        return None
    names = re.findall(rf"(?:{LETTER})+", name)
    if has_word(name, OTHER_NUMBER) or any(map(is_factor, names)) or not is_unit(unit):
        return None
    value = value_of_quantity(match)
    if value is None:
        return None
    unit = re.sub(r"[()]", " ", unit or before)  # 9 (apples)
    return value, name.strip(), "".join(unit.split())


def has_word(text, words):
    """True if a word of the text, or its singular, is one of `words`. -> bool"""
    found = re.findall("[a-z]+", text.lower())
    return any(word in words or word.removesuffix("s") in words for word in found)


def is_unit(text):
    """True if all words of the text can be units: "clips", " m/s^2", " square feet", "\u5143". -> bool

    A word needs 3 letters, or 4 if the text does not begin with a space ("72clips", not "2xyz"), or it must be
    one of SHORT_UNITS. In scripts without variables, shorter words are units too.
    """
    text = text.replace("por ciento", "percent")
    enough = 3 if text.startswith((" ", "/", "(")) else 4
    words = re.findall(rf"(?:{LETTER})+", text)
    is_other_number = has_word(text, OTHER_NUMBER | FACTORS) or any(map(is_factor, words))
    return not is_other_number and all(
        len(word) >= min(enough, fewest_letters(word)) or word in SHORT_UNITS for word in words
    )


def fewest_letters(word):
    """How many letters a unit has at least: 4 in Latin and Greek letters, 2 in Cyrillic ones, 1 in Han ones."""
    return 4 if word < "\u0400" else 2 if word < "\u0e00" else 1


def is_factor(word):
    """True if a word of another language multiplies or rejects the number before it. -> bool"""
    rest, word = HAN_UNITS.sub("", word), word.lower()
    has_numeral = any(letter in HAN_FACTORS or unicodedata.numeric(letter, 0) for letter in rest)
    is_known = word in OTHER_FACTORS or word.startswith(FACTOR_STEMS) or KOREAN_FACTOR.fullmatch(word)
    return has_numeral or bool(is_known)


def value_of_quantity(match):
    """The exact value of a match of QUANTITY; None for 3/0 and 1 5/2. -> Fraction or None"""
    top = Fraction(match["top"].replace(" ", ""))
    bottom = Fraction((match["bottom"] or "1").replace(" ", ""))
    if bottom == 0 or (match["whole"] and not top < bottom):
        return None
    value = int(match["whole"] or 0) + top / bottom
    value *= Fraction(10) ** int(match["exponent"] or 0)
    return -value if match["sign"] == "-" else value


def agree(one, other):
    """True if two names or two units are the same, or one is missing. -> bool"""
    return one == other or not one or not other


def same_quantity(one, other):
    """True if two simplified texts are the same number. -> bool

    Units are compared only if both have one: "72 km" equals "72", but not "72 m".
    """
    quantity, other_quantity = as_quantity(one), as_quantity(other)
    if quantity is None or other_quantity is None:
        return False
    value, name, unit = quantity
    other_value, other_name, other_unit = other_quantity
    return value == other_value and agree(name, other_name) and agree(unit, other_unit)


def parts_of(text):
    """Split a simplified text at brackets, commas and the signs of a matrix, without spaces. -> list of str

    "(2, 1/2)" has the parts "(", "2", ",", "1/2" and ")". A space between two digits stays. In "1,234, 5" the
    first comma separates thousands, because the other one has a space.
    """
    if len(text) > MOST_CHARACTERS:
        return [text]
    if ", " in text:
        text = without_commas(text)
    text = re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)
    return [part for part in re.split(r"([\[\](){},;&]|\\end)", text) if part]


def same_answer(answer, reference):
    """True if both are the same number, or the same text with the same numbers in it. -> bool

    "(2, 0.5)" equals "(2,1/2)", but neither "(0.5, 2)" nor "[2, 0.5]".
    """
    if plain(answer) == plain(reference) != "":
        return True
    answer, reference = simplified(answer), simplified(reference)
    if as_quantity(answer) or as_quantity(reference):
        return same_quantity(answer, reference)
    parts, reference_parts = parts_of(answer), parts_of(reference)
    if not parts or len(parts) != len(reference_parts):
        return False
    return all(one == other or same_quantity(one, other) for one, other in zip(parts, reference_parts))


# ---- Rewards -----------------------------------------------------------------------------------------------


def correct(completions, answer, **columns):
    """1.0 if the final answer is right, else 0.0. -> list of float

    answer[i] is an answer ("72"), or a solution whose final answer counts, as in gsm8k ("... #### 72") and MATH
    ("... \\boxed{72}"). Numbers are compared as numbers, so "72.0", "$72", "72 clips" and "x = 72" equal "72".
    Other answers are compared as texts. Both may be LaTeX.
    """
    rewards = []
    for i, (completion, reference) in enumerate(zip(completions, answer, strict=True)):
        right_answer = reference_answer(reference)
        if right_answer is None:
            prompt = columns.get("prompts", completions)[i]
            raise ValueError(f"no completion can equal answer[{i}]: {reference!r:.200} (prompt: {prompt!r})")
        final = final_answer(text_of(completion))
        rewards.append(float(final is not None and same_answer(final, right_answer)))
    return rewards


def well_formed(completions, **columns):
    """1.0 if the completion ends with its only <answer>, and it holds a number, else 0.0. -> list of float

    The number may be wrong. White space may follow.
    """
    rewards = []
    for completion in completions:
        text = text_of(completion).rstrip()
        answer = tagged_answer(text)
        only_one = text.count(OPENING) == 1 and text.count(CLOSING) == 1
        has_number = answer is not None and as_number(answer) is not None
        rewards.append(float(only_one and has_number and text.endswith(CLOSING)))
    return rewards


def shows_work(completions, **columns):
    """0.25 for each different line that has an equals sign, at most 1.0. -> list of float

    A reward that can be hacked: it pays for the look of a worked solution, and no line needs to be right.
    docs/grpo_math.md shows what a policy makes of it.
    """
    rewards = []
    for completion in completions:
        lines = {line for line in text_of(completion).splitlines() if "=" in line}
        rewards.append(min(0.25 * len(lines), 1.0))
    return rewards


def countdown(completions, target, nums, **columns):
    """1.0 if the last <answer> makes target[i] of nums[i], each used exactly once, else 0.0. -> list of float

    An answer is an expression such as (1 + 2) * 3: whole numbers, + - * / and parentheses. Division is exact.
    """
    rewards = []
    for completion, wanted, numbers in zip(completions, target, nums, strict=True):
        equation = tagged_answer(text_of(completion)) or ""
        wanted, numbers = Fraction(wanted), [Fraction(number) for number in numbers]  # "9" is 9; null raises
        rewards.append(float(solves_countdown(equation, wanted, numbers)))
    return rewards


def solves_countdown(equation, target, nums):
    """True if the equation uses each of nums exactly once and makes the target. -> bool"""
    equation = " ".join(equation.split())  # ast.parse takes a space at the start for an indentation
    if len(equation) > MOST_CHARACTERS or not re.fullmatch(r"[0-9+\-*/() ]+", equation):
        return False
    try:
        tree = ast.parse(equation, mode="eval")
        used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        return sorted(used) == sorted(nums) and value_of(tree.body) == target
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False  # the last two: nested too deeply for ast.parse or value_of


def value_of(node):
    """The value of a parsed expression. -> Fraction

    Raises ValueError for anything but whole numbers and + - * /, and ZeroDivisionError.
    """
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    if not isinstance(node, ast.BinOp):
        raise ValueError("not an expression of numbers")
    left, right = value_of(node.left), value_of(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Div):
        return left / right
    raise ValueError("not one of + - * /")
