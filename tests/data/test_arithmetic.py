"""data/make_arithmetic.py and data/math_rewards.py: the worked steps are right, and no completion can fool or
stop a reward."""

import runpy

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

REWARDS = runpy.run_path(str(ROOT / "data/math_rewards.py"))
WORLD = runpy.run_path(str(ROOT / "data/make_arithmetic.py"))


@pytest.mark.parametrize(
    "task, text",
    [
        (("+", 347, 85), "7+5=12 carry 1\n4+8+1=13 carry 1\n3+1=4\n<answer>432</answer>"),
        (("+", 95, 92), "5+2=7\n9+9=18\n<answer>187</answer>"),
        (("-", 300, 85), "10-5=5 borrow 1\n10-8-1=1 borrow 1\n3-1=2\n<answer>215</answer>"),
        (("-", 347, 345), "7-5=2\n4-4=0\n3-3=0\n<answer>2</answer>"),
    ],
)
def test_a_worked_solution_by_hand(task, text):
    assert WORLD["worked_solution"](*task) == text


# ---- Rewards -----------------------------------------------------------------------------------------------


def rate(name, text, **columns):
    """The reward of one text, which is the same if it is a list of messages."""
    completions = [text, [{"role": "assistant", "content": text}]]
    columns = {column: [value, value] for column, value in columns.items()}
    first, second = REWARDS[name](completions=completions, prompts=["", ""], trainer_state=None, **columns)
    assert isinstance(first, float) and first == second
    return first


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer> 432 </answer> done", "432"),
        ("<answer>1</answer> no: <answer>432</answer>", "432"),
        ("<answer>$1,234.50.</answer>", "1234.5"),
        (r"so it is \boxed{72}.", "72"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{72} and \boxed{3", "72"),  # the second one is not closed
        (r"\boxed{1} <answer>72</answer>", "72"),
        (r"<answer>There are 6 rows of 12, so \boxed{72}.</answer>", "72"),
        ("6 * 12 = 72\n#### 72", "72"),
        (r"\fbox{72}", "72"),
        ("<answer>72</answer>", "6 * 12 = <<6*12=72>>72\n#### 72"),
        # references that are solutions, numbers or lists
        (r"\boxed{5}", r"Adding, $2 + 3 = \boxed{5}.$ (Or $3 + 2$.)"),
        (r"\boxed{0.5}", r"We get $x=\boxed{\frac{1}{2}}$."),
        (r"\boxed{5}", r"Adding, $2 + 3 = \boxed 5$. Done."),
        (r"\boxed{5}", r"Adding, $2 + 3 = \fbox{5}$."),
        (r"\boxed{5}", "2 + 3 = 5\n<answer>5</answer>"),
        (r"\boxed{\frac{1}{2}}", r"\\frac{1}{2}"),  # escaped twice
        (r"\boxed{5}", 5),
        (r"\boxed{5}", 5.0),
        (r"\boxed{5}", ["5"]),
    ],
)
def test_a_right_answer(text, answer):
    assert rate("correct", text, answer=answer) == 1.0


@pytest.mark.parametrize(
    "text, answer",
    [
        ("432", "432"),  # no final answer
        ("<answer>432", "432"),
        ("<answer>432</answer> no: <answer>1</answer>", "432"),
        (r"\boxed{432} <answer>1</answer>", "432"),
        (r"<answer>There are 6 rows of 12, so \boxed{72}.</answer>", "12"),
        ("<answer>4,32</answer>", "432"),
        ("<answer>72</answer>", "72 apples and 5 pears\n#### 5"),
        (r"\boxed{2}", r"Adding, $2 + 3 = \boxed{5}.$"),
    ],
)
def test_a_wrong_answer(text, answer):
    assert rate("correct", text, answer=answer) == 0.0


def in_all_places(inside):
    r"""An answer in <answer> tags, in \boxed{}, in both, and after ####."""
    box = rf"\boxed{{{inside}}}"
    return [f"<answer>{inside}</answer>", f"So {box}.", f"<answer>{box}</answer>", f"#### {inside}"]


@pytest.mark.parametrize(
    "inside, answer",
    [
        # units and words
        (r"72 \text{ clips}", "72"),
        ("72cm", "72"),
        ("$72/hour", "72"),
        ("5 cm\N{SUPERSCRIPT TWO}", "5"),
        ("\N{EURO SIGN}72", "72"),
        (r"72\%", "72"),
        (r"72^\circ", "72"),
        ("x = 72", "72"),
        ("The answer is 72.", "72"),
        (r"\approx 3.14", "3.14"),
        # LaTeX and Markdown
        (r"\textbf{\text{72}}", "72"),
        (r"\boxed{\boxed{72}}", "72"),
        (r"\left(72\right)", "72"),
        # digits in groups
        ("1{,}234", "1234"),
        (r"1,\!234,\!567", "1234567"),
        ("1 234 567.5", "1234567.5"),
        # fractions
        (r"\dfrac{3}{4}", "0.75"),
        (r"\frac34", "3/4"),
        (r"1\frac{1}{2}", "1.5"),
        ("1 1/2 cups", "3/2"),
        ("1\N{VULGAR FRACTION ONE HALF}", "3/2"),
        # signs and digits of Unicode
        ("\N{MINUS SIGN}5", "-5"),
        ("\N{FULLWIDTH DIGIT SEVEN}\N{FULLWIDTH DIGIT TWO}", "72"),
        ("\N{ZERO WIDTH SPACE}72", "72"),
        # decimals and powers of ten
        (".5", "1/2"),
        (r"1.2\cdot10^{-3} \text{ m}", "0.0012"),
        ("1.2 \N{MULTIPLICATION SIGN} 10\N{SUPERSCRIPT THREE}", "1200"),
        ("10^{3}", "1000"),
        # texts
        (r"\textbf{(C)}", "C"),
        (r"x^{2}+1", "x^2 + 1"),
        ("2 x", "2x"),
        # pairs, intervals, lists, sets, matrices
        ("(2, 3)", "(2,3)"),
        ("(2 , 3)", "(2, 3)"),
        ("1, 2", "1,2"),
        ("[0, 1)", "[0,1)"),
        (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2)\cup(3,\infty)"),
        ("(-\N{INFINITY}, 2)", r"\left(-\infty,2\right)"),
        (r"\left\{1, 2\right\}", r"\{1,2\}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2.0\end{pmatrix}"),
        (r"\begin{bmatrix} 1 & 0.5 \\ x & 2 \end{bmatrix}", r"\begin{pmatrix}1&\frac12\\x&2\end{pmatrix}"),
        (r"(\frac{1}{2}, 3)", "(0.5, 3)"),
        ("x = 1, x = 2", "1,2"),
        ("1,234, 5", "1234, 5"),
        # a word for a large number that is not one here
        ("The final score is 72", "72"),
        # units in other languages
        ("72元", "72"),
        ("72 个苹果", "72"),
        ("72人", "72人"),
        ("72년", "72"),
        ("72 км", "72"),
        ("72км/ч", "72 км/ч"),
        ("72 г", "72"),
        ("72 años", "72"),
        ("72 Äpfel", "72"),
        ("72 रुपये", "72"),
        ("72 บาท", "72"),
        ("72 كم", "72"),
        ("72 ₽", "72"),
        ("72 км²", "72 км^2"),
        ("72㎡", "72"),
        ("72千米", "72"),
        ("72个三角形", "72"),
        ("72 недели", "72"),
        ("72 больных", "72"),
        ("72 maisons", "72"),
        ("72 bins", "72"),
        ("72 만두", "72"),
        ("72 zł", "72"),
        ("72 por ciento", "72"),
        # digits, percent signs and full stops of other scripts
        ("٧٢", "72"),
        ("७२ रुपये।", "72"),
        ("৭২", "72"),
        ("۷۲٪", "72"),
        ("٧٫٢", "7.2"),
        ("72元。", "72"),
        # words and currencies in front
        ("答案：72元", "72"),
        ("答案是72", "72"),
        ("一共72个苹果", "72"),
        ("Ответ: 72", "72"),
        ("La respuesta es 72", "72"),
        ("R$ 72", "72"),
        ("CHF 1’234", "1234"),
        ("HK$72", "72"),
        ("RMB 72", "72"),
        # a unit in brackets
        ("9 apples", "9 (apples)"),
        ("9 (apples)", "9 apples"),
        ("9 (apples)", "9"),
        ("9(kg)", "9 kg"),
    ],
)
def test_a_right_answer_in_another_format(inside, answer):
    for text in in_all_places(inside):
        assert rate("correct", text, answer=answer) == 1.0


@pytest.mark.parametrize(
    "inside, answers",
    [
        # more than one number
        ("72 or 73", ["72", "73"]),
        ("3-4", ["3", "4", "-4"]),
        ("x or y = 3", ["3"]),
        ("(3, 4)", ["3", "4", "34"]),
        ("(1,234)", ["1234"]),
        # spaces and commas in other places
        ("7 2", ["72", "7", "2"]),
        ("1,23", ["123", "1", "23", "1.23"]),
        (r"3 \quad 400", ["3400"]),
        # another number
        (r"1\frac{1}{2}", ["11/2", "1/2"]),
        (r"\frac{3}{0}", ["3", "0", "30"]),
        ("-5", ["5"]),
        ("72%", ["0.72"]),
        ("5^{2}", ["5", "52"]),
        ("10^{10^{10}}", ["10", "1e100"]),
        # not the number alone
        ("72x", ["72"]),
        (r"\sqrt{72}", ["72"]),
        ("2x = 72", ["72", "36"]),
        (r"\geq 72", ["72"]),
        ("72 thousand", ["72"]),
        ("72 crore", ["72"]),
        ("5 mil", ["5"]),
        ("5 gross", ["5"]),
        ("3 sixteenths", ["3"]),
        # in other languages: ten thousand, a hundred million, thousands, a half, at least
        ("72万", ["72"]),
        ("72亿元", ["72"]),
        ("72만원", ["72"]),
        ("72 тысячи", ["72"]),
        ("72 млн", ["72"]),
        ("72 millones", ["72"]),
        ("72 nghìn", ["72"]),
        ("72 triệu đồng", ["72"]),
        ("72千元", ["72"]),
        ("72분의 1", ["72"]),
        ("72분의1", ["72"]),
        ("72만여 명", ["72"]),
        ("72 tysięcy", ["72"]),
        ("72 tusen", ["72"]),
        ("72 juta", ["72"]),
        ("72 тисяч", ["72"]),
        ("72 χιλιάδες", ["72"]),
        ("72 হাজার", ["72"]),
        ("72 אלף", ["72"]),
        ("72 هزار", ["72"]),
        ("٧٢ ألف", ["72"]),
        ("x不是72", ["72"]),
        ("负72", ["72"]),
        ("约72", ["73"]),
        ("72个半", ["72"]),
        ("72以上", ["72"]),
        ("72 или 73", ["72", "73"]),
        ("72θ", ["72"]),
        ("72х", ["72"]),
        ("72元", ["73", "72 km"]),
        ("9 (x)", ["9"]),
        # other pairs, intervals, lists, matrices
        ("(2, 3)", ["(3, 2)", "[2, 3]", "(2, 3, 3)", "2, 3", "23"]),
        ("1, 2", ["12", "1", "1, 22"]),
        ("1, 234", ["1,234", "1234"]),
        ("7 2, 3", ["72, 3"]),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", [r"\begin{pmatrix}1&2\end{pmatrix}"]),
        ("0.72...", ["0.72"]),
        ("not 72", ["72"]),
        # contradictions
        ("72 km", ["72 m", "73 km"]),
        ("x = 72", ["y = 72"]),
        # texts
        (r"\sqrt{2+x}", [r"\sqrt{2}+x"]),
    ],
)
def test_a_wrong_answer_in_a_similar_format(inside, answers):
    for text in in_all_places(inside):
        for answer in answers:
            assert rate("correct", text, answer=answer) == 0.0


@pytest.mark.parametrize(
    "reference",
    [
        None,
        float("nan"),
        "",
        " $ ",
        "6 * 12 = 72\n####",
        [],
        ["5", "five"],
        {"answer": "5"},
        r"so it is \boxed{72",
        "\frac{1}{2}",  # in JSON, and here, \f is a form feed
        "So it is \boxed{72}.",
        "72 \text{ cm}",
        "2 \times 3",
        "x \neq 2",
        "\right)",
    ],
)
def test_a_reference_that_no_answer_can_equal_is_named(reference):
    """Every response would get 0, or the response "None" would get 1."""
    for answer in (str(reference), "72"):
        with pytest.raises(ValueError, match=r"can equal answer\[1\]: .*\(prompt: 'How many"):
            REWARDS["correct"](
                [rf"\boxed{{{answer}}}"] * 2, answer=["72", reference], prompts=["", "How many clips?"]
            )


PIECES = r"72 1/2 1,234 10^ . , - + = : ^ _ * / ( ) { } [ ] \ ~ $ % e x is or clips cm #### </answer>".split()
PIECES += [r"\frac", r"\text{", r"\boxed{", r"\times", r"\,", r"\!", " ", "\n", "\x00", "\ud800", "<answer>"]
PIECES += ["\N{MINUS SIGN}", "\N{SUPERSCRIPT TWO}", "\N{VULGAR FRACTION ONE HALF}", "\ufdfa", "\u0301"]


@settings(deadline=None, max_examples=500)
@given(*[st.lists(st.sampled_from(PIECES), max_size=20).map("".join)] * 2)
def test_no_text_raises_and_the_comparison_is_symmetric(text, other):
    same = REWARDS["same_answer"](text, other)
    assert same == REWARDS["same_answer"](other, text)
    assert REWARDS["same_answer"](text, text) == (REWARDS["plain"](text) != "")
    if REWARDS["reference_answer"](other) is not None:
        for whole in in_all_places(text):
            assert rate("correct", whole, answer=other) in (0.0, 1.0)


@pytest.mark.parametrize(
    "name, text, reward",
    [
        ("well_formed", "7+5=12\n<answer>12</answer>\n", 1.0),
        ("well_formed", "<answer>7 clips</answer>", 0.0),
        ("well_formed", "<answer>7</answer><answer>7</answer>", 0.0),
        ("shows_work", "7+5=12 carry 1\n4+8+1=13 carry 1\n3+1=4\n<answer>432</answer>", 0.75),
        ("shows_work", "1=2\n3=4\n5=6\n7=8\n9=9", 1.0),  # right or wrong, and more than four earn no more
        ("shows_work", "1=1\n1=1\n1=1", 0.25),  # the same line counts once
        ("shows_work", "<answer>432</answer>", 0.0),
    ],
)
def test_rewards_for_the_form(name, text, reward):
    assert rate(name, text) == reward


@pytest.mark.parametrize(
    "equation, nums, target, reward",
    [
        ("(1 + 2) * 3", [1, 2, 3], 9, 1.0),
        ("8/(3-8/3)", [3, 3, 8, 8], 24, 1.0),  # exact only with fractions
        ("-3+5", [5, 3], 2, 1.0),
        ("3*3", [1, 2, 3], 9, 0.0),  # not all numbers
        ("1+2*3 = 7", [1, 2, 3], 7, 0.0),
        ("3**2+1", [1, 2, 3], 10, 0.0),
        ("1/0", [1, 0], 0, 0.0),
        ("03+2", [3, 2], 5, 0.0),
        ("3+2", ["3", "2"], "5", 1.0),  # columns of texts
    ],
)
def test_countdown(equation, nums, target, reward):
    assert rate("countdown", f"I see. <answer>{equation}</answer>", target=target, nums=nums) == reward


@pytest.mark.parametrize("target, nums", [(None, [3, 2]), ("five", [3, 2]), (5, None), (5, "[3, 2]")])
def test_a_countdown_that_no_equation_can_solve(target, nums):
    with pytest.raises((TypeError, ValueError)):
        rate("countdown", "<answer>3+2</answer>", target=target, nums=nums)


HOSTILE = [
    "1/0",
    "1" + ",111" * 50_000,
    "(" * 10_000 + "1" + ")" * 10_000,
    "{" * 100_000,
    r"\boxed{" * 50_000 + "}" * 50_000,
    "<answer>" * 50_000,
    "#### " * 50_000,
    "432e999999999",
    "1 000 " * 33 + "x",
    "5 a^2" + "a^2" * 64 + "!",
    "\N{VULGAR FRACTION ONE HALF}" * 200,
    "\ufdfa" * 200,  # each is 18 characters after NFKC
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:20]))
def test_hostile_texts_earn_nothing(text):
    """Quadratic time would take minutes."""
    for whole in (text, f"<answer>{text}</answer>", rf"\boxed{{{text}}}", f"#### {text}"):
        assert rate("correct", whole, answer="432") == 0.0
        if REWARDS["reference_answer"](text) is not None:
            assert rate("correct", "<answer>432</answer>", answer=text) == 0.0
        assert rate("countdown", whole, target=432, nums=[1, 2]) == 0.0
        assert rate("well_formed", whole) in (0.0, 1.0)
        assert 0.0 <= rate("shows_work", whole) <= 1.0


def test_several_completions_keep_their_order():
    completions = ["<answer>1</answer>", "<answer>2</answer>", "<answer>3</answer>"]
    assert REWARDS["correct"](completions, answer=["1", "1", "3"]) == [1.0, 0.0, 1.0]
    assert REWARDS["countdown"](completions, target=[1, 2, 3], nums=[[1], [1], [3]]) == [1.0, 0.0, 1.0]
    assert REWARDS["correct"]([], answer=[]) == REWARDS["well_formed"]([]) == []


def test_the_last_message_counts():
    messages = [
        {"role": "assistant", "content": "<answer>1</answer>"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<answer>2</answer>"},
    ]
    no_text = [{"role": "assistant", "content": None}]
    assert REWARDS["correct"]([messages, no_text, []], answer=["2", "2", "2"]) == [1.0, 0.0, 0.0]
