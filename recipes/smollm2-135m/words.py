"""The words of make_prompts.py: lists and templates, no code that does anything.

A slot in braces is filled by `fill` in make_prompts.py: `{name}` from the list `name` in LISTS,
`{n:3-20}` with a number, `{p:$2.50-9.00}` with an amount of money, `{t:07:00-11:30}` with a time of
day, `{x:red|blue}` with one of the choices. A slot that was named comes back as `{n}`. A list is
one string: one entry a line, or entries between `|`, or single words.
The subjects of benchmarks/suite.jsonl do not occur here: they are for measuring only.
"""

# ---------------------------------------------------------------- lists that slots are drawn from

LISTS = {
    "woman": (
        "Amara Beth Chloe Dalia Elena Fatima Greta Hannah Ines Jasmine Kaori Leila Mei Nadia Olga "
        "Paula Rosa Samira Tessa Uma Vera Wanda Xenia Yasmin Zoe Ingrid Sofia Marta Ruth Joan"
    ),
    "man": (
        "Ahmed Bruno Carlos Dmitri Ethan Felix Gustav Hassan Ivan Jamal Kenji Leo Mateo Nikhil "
        "Omar Pavel Quentin Rafael Samuel Tariq Ulrich Victor Walter Yusuf Zack Hugo Martin Paul "
        "Simon Dennis"
    ),
    "name": (
        "Ava Ben Clara David Emma Farid Grace Henry Isla Jack Karen Liam Mina Noah Olivia Pedro "
        "Rachel Sara Theo Ursula Vikram Wendy Yara Zane Anna Marcus Julia Kofi Linda Mohamed "
        "Nina Oliver Petra Ravi Susan Tomas Alice Boris Carmen Derek Eva Frank Gina Harold Irene"
    ),
    "surname": (
        "Abbott Baranov Castillo Dubois Eriksen Fischer Garcia Hughes Ito Jensen Kaplan Lopez "
        "Moreau Nakamura Ortiz Petrov Quinn Rossi Silva Turner Ueda Vargas Walsh Xu Young Zeman "
        "Adeyemi Brandt Chowdhury Delgado Ellis Fontaine Gallagher Haddad Ibrahim Jansen"
    ),
    "city": (
        "Madrid Toronto Nairobi Berlin Sydney Chicago Dublin Prague Vienna Boston Lima Seoul "
        "Oslo Athens Cairo Denver Glasgow Hanoi Jakarta Krakow Lagos Manila Naples Ottawa Quito "
        "Rotterdam Seattle Tokyo Utrecht Valencia Warsaw Zagreb Geneva Helsinki Istanbul Austin"
    ),
    "town": (
        "Ashford Brookdale Coldwater Dunmore Elmsworth Fairhaven Greystone Hollowbrook Inverley "
        "Kettleby Larkfield Marlow Northgate Oakhurst Pinewood Ravensby Stonebury Thornbury "
        "Upwell Westerley Winterfold Yarrowdale Maplewood Silverton Redcliff Easton"
    ),
    "street": (
        "Birch Lane|Canal Street|Mill Road|Station Road|Oak Avenue|Harbour Street|Chapel Lane|"
        "Park Road|Rose Street|King Street|Hill Road|Meadow Lane|Garden Street|Victoria Road"
    ),
    "month": (
        "January February March April May June July August September October November December"
    ),
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "good": (
        "notebook pencil sandwich muffin T-shirt candle mug book ticket poster plate cushion "
        "banana melon lemon coffee cookie burger pizza keyboard cable lamp chair toy puzzle "
        "ball hat towel battery-pack plant sticker magnet keyring jar bottle bag basket-ball "
        "pen folder calendar"
    )
    .replace("basket-ball", "football")
    .replace("battery-pack", "charger"),
    "job": (
        "nurse|teacher|bus driver|librarian|carpenter|photographer|baker|translator|dentist|"
        "gardener|pilot|plumber|journalist|farmer|architect|chemist|electrician|tailor|chef|"
        "postman|engineer|musician|veterinarian|firefighter|bookseller|painter"
    ),
    "shop": (
        "bookshop|hardware store|flower shop|corner shop|toy store|bike shop|stationery shop|"
        "sports shop|music store|garden centre|pet shop|shoe shop|market stall|gift shop"
    ),
    "flaw": (
        "is too loud|arrived damaged|does not switch on|has a missing part|is the wrong colour|"
        "stopped working after a week|smells of plastic|is much smaller than in the picture"
    ),
    "currency": "euros dollars pounds francs crowns",
    "object": (
        "a teapot|a bicycle|a kettle|a backpack|a pair of headphones|a rug|a bookshelf|a camera|"
        "a printer|a toaster|a tent|a vacuum cleaner|a phone case|a winter coat|a coffee machine"
    ),
}

# ------------------------------------------------------------------------------------ arithmetic

ARITHMETIC = """
{name} buys {a:2-9} {good}s at {p:$0.80-9.50} each and {b:2-6} {good2}s at {q:$1.20-7.90} each. What is the total?
A {good} costs {p:$1.10-8.90}. {name} buys {a:2-5} of them and pays with {n:$50-100/50}. How much change is that?
{woman} has {a:$40-95}. She spends {b:$11-19} on a {good:book|scarf|ticket} and {c:$5-9} on lunch. How much is left?
A car drives {d:120-480/10} km in {h:2-6} hours. What is its average speed?
A cyclist rides at {v:14-28} km/h for {h:2-5} hours and {m:15|30|45} minutes. How far does the cyclist get?
The bus to {city} covers {d:90-360/30} miles at an average of {v:40-60/5} mph. How long does the journey take?
{name} walks {d:3-9} km to {town} at {v:4-6} km/h and cycles back at {w:12-18/2} km/h. How long does the whole trip take?
Two cars start from the same place and drive in opposite directions, one at {v:50-80/5} km/h and the other at {w:60-95/5} km/h. How far apart are they after {h:2-5} hours?
A garden is {a:6-30} metres long and {b:4-18} metres wide. What is its area, and how many metres of fence go around it?
A rectangular field has an area of {a:240-960/120} square metres and is {b:12|20|24|30} metres long. How wide is it?
How many tiles of {s:20|25|50} cm by {s} cm are needed for a kitchen floor of {a:3-6} m by {b:2-4} m?
A triangle has a base of {a:4-24/2} cm and a height of {b:5-18} cm. What is its area?
A circle has a radius of {r:2-15} cm. What are its circumference and its area? Use 3.14 for pi.
A box is {a:20-60/5} cm long, {b:15-40/5} cm wide and {c:10-30/5} cm high. What is its volume in litres?
What is {p:5-95/5}% of {n:40-960/20}?
{a:12-48/4} of the {n:60-160/20} students in a school play football. What percentage is that?
A coat costs {p:$60-240/20}. In the sale it is {d:10-50/5}% off. What is the sale price?
A {shop} raises the price of a {good} from {p:$10-20} to {q:$22-30}. By how many percent did it go up?
{name} sees {object} for {p:$80-300/10}, with {d:10-30/5}% off and then another {e:5-10/5}% off at the till. What is the final price?
A laptop costs {p:$450-1200/50} before tax. The tax is {t:6-21}%. What is the price with tax?
{a:3-7} friends share a dinner bill of {p:$60-180/2}. They add a tip of {t:10-20/5}%. How much does each of them pay?
{name}, {name2} and {name3} rent a van for {p:$90-180/3} and split the cost equally. {name} also paid {q:$21-48/3} for fuel, to be split the same way. Who owes whom how much?
A taxi costs {p:$3-6} to start and {q:$1.20-2.60} per kilometre. How much is a ride of {d:5-25} km?
Convert {a:3-90} kilometres to miles, with 1 mile = 1.6 km.
How many minutes are there in {a:2-12} hours and {b:5-55/5} minutes? And how many seconds?
A recipe from America says {a:325|350|375|400|425} degrees Fahrenheit. What is that in Celsius?
A bag of flour weighs {a:2-8} pounds. How many kilograms is that if one pound is 0.45 kg?
How many {s:150|200|250|300} ml glasses can be filled from {a:2-9} litres of juice?
A cake for {a:6|8} people needs {b:150-350/50} g of sugar and {c:3-5} eggs. What is needed for {d:12|16|20|24} people?
On a map with a scale of 1:{s:25,000|50,000|100,000} two villages are {a:3-18} cm apart. How far is that in kilometres?
A model ship is built at 1:{s:50|100|200}. The real ship is {a:40-180/10} metres long. How long is the model in centimetres?
{woman} scored {a:61-98}, {b:55-97}, {c:60-99} and {d:52-95} in four tests. What is her average?
The average of five numbers is {a:12-30}. Four of them are {b:5-12}, {c:10-20}, {d:12-18} and {e:15-25}. What is the fifth?
The temperatures in {city} this week were {a:8-14}, {b:9-16}, {c:7-15}, {d:10-18}, {e:11-17}, {f:9-19} and {g:8-16} degrees. What was the mean, and what was the range?
{man} can mow a lawn in {a:2-4} hours and {woman} needs {b:5-6} hours. How long do they take together?
{a:3-8} workers build a wall in {b:6-15} days. How long would {c:9-12} workers take at the same pace?
A machine makes {a:40-180/10} bottles in {b:5-15/5} minutes. How many does it make in {c:2-8} hours?
A tap fills a tank of {a:200-800/50} litres at {b:8-25} litres per minute. How long does it take?
{woman} is {a:3-9/2} years older than her brother. Together they are {b:31-61/2} years old. How old are they?
{man} is {a:30-44} and his daughter is {b:4-12}. In how many years will he be twice as old as she is?
{name} saves {a:$15-90/5} a week for {object} that costs {p:$180-900/30}. How many weeks does it take?
{name} puts {a:$400-3000/100} into a savings plan with {r:2-6}% simple interest a year. How much is there after {y:2-6} years?
{name} puts {a:$500-4000/500} in the bank at {r:2-5}% compound interest. How much is it worth after {y:2-3} years?
{name} earns {a:$12-28} an hour and works {h:20-40} hours a week. How much is that in {w:4-12} weeks?
A film starts at {t:17:00-20:45} and lasts {m:95-165} minutes. When does it end?
A class begins at {t:08:00-10:30} and ends at {u:11:15-13:45}, with a break of {b:10-25/5} minutes. How long is the class without the break?
{name} needs {a:35-50/5} minutes to get ready, {b:10-30/5} minutes to the station, and wants to be there {c:5-15/5} minutes early. The coach leaves at {t:10:00-14:30}. When should {name} get up?
A shift starts at {t:21:00-23:30} and ends at {u:05:00-07:30} the next morning. How many hours is that?
{name} reads {a:15-40} pages a day. How many days does a book of {b:220-640/10} pages take, and how many pages are left for the last day?
A farmer packs {a:240-960/4} eggs into boxes of {b:6|10|12}. How many boxes are full, and how many eggs are left over?
A theatre has {a:14-32} rows with {b:16-30} seats each. {c:120-210/5} seats are empty. How many people are there?
A phone plan costs {p:$10-25} a month plus {q:0.05-0.20} per minute. What does a month with {m:60-300/20} minutes cost?
{name} drives {d:180-600/20} km. The car uses {l:5-9} litres for 100 km and a litre costs {p:$1.40-1.95}. What does the fuel cost?
Rent is {a:$600-1200/50}, food is {b:$250-480/10} and transport is {c:$60-140/10} a month. The salary is {d:$1900-2900/100}. How much can be saved in a year?
Mix {a:2-5} parts of syrup with {b:5-9} parts of water. How much syrup is in {c:700-2800/700} ml of the drink?
The ratio of cats to dogs in a shelter is {a:2-5}:{b:3-7}. There are {c:20-40/4} cats and dogs together in one room of the same ratio. How many of them are cats, roughly?
A pool loses {a:2-6}% of its {b:20000-60000/5000} litres every week. How many litres are lost in one week, and in two?
A school orders {a:12-30} boxes of {b:24|36|48|50} pencils for {c:8-15} classes. How many pencils does each class get?
{name} ran {a:3-8} km on Monday, {b:4-9} km on Wednesday and twice as far as on Monday on Saturday. How far is that in total?
A plant grows {a:2-7} cm a week. It is {b:8-20} cm tall now. How tall will it be in {c:5-12} weeks?
A {shop} sold {a:24-80} {good}s on Friday, {b:10-23} more on Saturday and half as many as on Friday on Sunday. How many did it sell in the three days?
There are {a:18-32} children on a trip, and one adult for every {b:4-6} children. A ticket is {p:$4-7} for a child and {q:$8-12} for an adult. What does the trip cost?
{name} has {a:3-9} bags with {b:12-30} marbles each and gives {c:15-35} marbles to {name2}. How many are left?
What is {a:112-987} + {b:145-998} - {c:51-240}?
Work out {a:12-98} x {b:11-79}.
What is {a:480-9600/48} divided by {b:3|4|6|8|12|16}?
Calculate ({a:12-60} + {b:5-45}) x {c:3-12} - {d:10-99}.
What is {a:1|2|3}/{b:4|5|7} + {c:1|2}/{d:3|8|9}? Give the answer as a fraction.
Solve for x: {a:2-9}x + {b:3-25} = {c:40-98}
Which is more, {a:15-45/5}% of {b:60-240/20} or {c:50-80/5}% of {d:30-90/10}?
Round {a:3.141-98.957} to one decimal place and then multiply it by {b:4-12}.
A number is multiplied by {a:3-9}, then {b:4-20} is added, and the result is {c:60-150}. What was the number?
What is the next number in the sequence {a:2-4}, {b:5-7}, {c:8-10}, {d:11-13}? Explain the pattern if there is one.
A {good} weighs {a:120-480/20} g and a {good2} weighs {b:90-350/10} g. How much do {c:4-9} {good}s and {d:3-8} {good2}s weigh in kilograms?
It is {t:08:00-11:30} in {city} and {city2} is {a:3-9} hours ahead. What time is it in {city2}, and what time will it be there after a flight of {b:5-12} hours?
If {a:3-8} {good}s cost {p:$6-48/2}, how much do {b:9-20} {good}s cost?
Which is the better buy: {a:250-450/50} g of rice for {p:$0.90-1.60} or {b:500-950/50} g for {q:$1.70-3.20}?
{name} and {name2} together have {n:$40-120/2}. {name} has {a:$4-18/2} more than {name2}. How much does each of them have?
A lottery prize of {p:$600-9000/300} is divided among three people in the ratio {a:1-3}:{b:2-4}:{c:3-5}. How much does each get?
A bucket with a hole loses {a:20-90/10} ml a minute. How much water is lost in {h:1-5} hours and {m:15|30|45} minutes?
{man} eats {a:2-4} apples a day. An apple costs {p:$0.30-0.80}. What does he spend on apples in {month}?
The population of {town} was {a:2000-9000/500} and grew by {b:2-8}% a year. How many people live there after two years?
A stack of {a:150-500/50} sheets of paper is {b:2-6} cm high. How thick is one sheet in millimetres?
A snail climbs {a:3-5} m up a wall every day and slides {b:1-2} m down every night. The wall is {c:9-20} m high. On which day does it reach the top?
A swimming lane is {a:25|50} m long. {name} swims {b:12-60/2} lanes in {m:15-55/5} minutes. How far is that, and how fast in metres per minute?
A printer prints {a:12-40} pages a minute. How long does it take to print {b:6-30} copies of a booklet with {c:16-64/4} pages?
{name} bought a bicycle for {p:$120-380/20}, spent {q:$20-60/5} on repairs and sold it for {s:$260-520/20}. What was the profit or the loss, also in percent?
From {a:30-90/5} kg of grapes you get {b:20-28} litres of juice. How many bottles of 0.75 litres can {c:150-600/50} kg fill?
There are {a:4-12} red, {b:3-10} blue and {c:2-9} green balls in a bag. What is the probability to draw a blue one?
Two dice are thrown. What is the probability that the sum is {n:3-11}?
In how many ways can {n:4-7} people stand in a row?
How many handshakes are there when {n:5-14} people all shake hands with each other once?
{woman} wants to put {a:24-60/6} photos into an album, {b:4|5|6} on a page, and leave every {c:3|4|5}th page empty. How many pages does she need?
A ladder of {a:5|10|13} m leans against a wall. Its foot is {b:3|4} m away from the wall. How high does it reach?
A square has the same perimeter as a rectangle of {a:4-14/2} by {b:6-18/2} cm. Which has the larger area, and by how much?
A gym costs {p:$18-45} a month, or {q:$190-420/10} a year. How much does {name} save with the yearly price?
{name} drinks {a:3-6} glasses of {b:200|250|300} ml of water before lunch and {c:2-5} after it. How far is that from {d:2|2.5|3} litres?
A cinema has {a:120-300/20} seats. {p:55-95/5}% of them are taken. How many are free?
A {job} charges {p:$30-75/5} for the visit and {q:$25-60/5} for every half hour. What does a job of {h:1-4} and a half hours cost?
A rope of {a:12-60/3} m is cut into two parts, one twice as long as the other. How long are they?
The sum of three consecutive numbers is {n:33-150/3}. What are they?
Half of a number plus {a:4-20} is {b:24-70}. Find the number.
A watch loses {a:2-6} minutes a day. It was set right on {day} at noon. What does it show exactly one week later?
Today is {day}. What day of the week will it be in {n:20-200} days?
{name} was born in {a:1948-2012}. How old will {name} be in {b:2030-2060/5}?
A plane flies {d:900-4200/100} km against the wind in {a:3-6} hours at {b:150|200|250|300} metres a second. Can that be right? Check the numbers.
A baker needs {a:350-650/50} g of dough for a {x:loaf|pizza base|plait}. How many can be made from {b:8-30} kg?
{woman} types {a:35-80/5} words a minute. How long does a report of {b:1200-4800/200} words take her, with a break of {c:5-10/5} minutes?
The entrance fee is {p:$6-14} for adults and half of that for children. A family of two adults and {b:2-5} children has a voucher for {q:$3-5}. What do they pay?
An orchard has {a:9-24} rows of {b:12-30} trees. Each tree bears about {c:18-60/2} kg of fruit. How many tonnes is that?
{a:2-9} cm of rain fell on a roof of {b:40-160/10} square metres. How many litres is that?
I have {a:4-15} coins of 20 cents, {b:3-12} of 50 cents and {c:2-9} of 10 cents. How much money is that?
I sleep from {t:21:30-23:55} to {u:05:30-08:00}. How many hours is that a night, and how many a week?
my car needs {a:5-8} litres for 100 km, the tank holds {b:40-60/5} litres. how far can i get
what is {a:8-30}% tip on {p:$24-120/4}
A concert hall sold {a:120-380/10} tickets at {p:$15-25} and {b:60-140/10} tickets at {q:$30-45}. How much came in?
"""  # noqa: E501

ARITHMETIC_ASKS = """
Show your work.
Explain step by step.
Think step by step.
Show every step of the calculation.
Please explain how you get the answer.
Work it out step by step and then give the final answer on its own line.
Just give me the answer and one line of explanation.
Write down the formula first.
Please check your result at the end.
Explain it so that a ten-year-old understands it.
I want to see the calculation, not only the result.
Break it into small steps.
Do it slowly, I always get these wrong.
Number the steps.
"""

ARITHMETIC_OPENINGS = """
Can you help me with this?
My homework question:
I need help with a word problem.
Solve this problem:
Quick maths question.
Here is a problem from my son's exercise book.
Please calculate this for me.
I am studying for a test and don't understand this one:
Could you work this out?
Help me check my answer.
A question from our quiz night:
Math problem:
"""

# ------------------------------------------------------------------------------------------ chat

HOW_TO = """
remove a red wine stain from a carpet
get rid of fruit flies in the kitchen
clean a burnt saucepan
unclog a shower drain
fix a dripping tap
hang a heavy mirror on a plaster wall
descale an electric kettle
sharpen a kitchen knife
wash a down jacket without ruining it
get candle wax out of a tablecloth
iron a shirt properly
sew on a button
make a bed with neat corners
pack a suitcase so that nothing creases
cook rice that does not stick
make a simple tomato sauce from scratch
poach an egg
roast a chicken so that it stays juicy
keep an avocado green
bake a chocolate cake without eggs
make yoghurt at home
freeze vegetables from the garden
make good coffee without a machine
tell whether a melon is ripe
make pancakes fluffy
season a cast-iron pan
grow tomatoes on a balcony
prune an old apple tree
start a compost heap
keep slugs away from lettuce
repot an orchid
plant tulip bulbs
grow strawberries in a hanging pot
water the garden while I am on holiday
get rid of moss in the lawn
attract more bees to a small garden
set up a new phone for my grandmother
back up the photos on my phone
make a strong password that I can remember
free up storage on an old laptop
connect a printer to the wifi
recognise a phishing email
sort a spreadsheet by two columns
make a pie chart in a spreadsheet
merge two PDF files
use keyboard shortcuts to work faster
set up a home wifi that reaches the attic
write my first program in Python
undo the last commit in git
write a formula that adds up a column
make a monthly budget
save money on groceries
ask for a pay rise
pay off two credit cards
start putting money aside for retirement
read a pay slip
compare two mortgage offers
haggle at a flea market
sell old furniture online
find a cheap flight
travel with a toddler on a long flight
get over jet lag
stay safe when hiking alone
learn the basics of a language before a trip
take good pictures at night
read a paper map
choose a tent
plan a bike trip along a river
fall asleep faster
stop biting my nails
stretch after a run
train for a first 5 km run
sit properly at a desk all day
drink more water during the day
take care of a sprained ankle
treat a mild sunburn
calm down before an exam
learn vocabulary faster
take better notes in lectures
stop putting off my homework
write a good introduction for an essay
memorise a long poem
give a short speech without panicking
learn to play the guitar as an adult
teach a child to ride a bike
help a shy child make friends
get a toddler to eat vegetables
introduce a new kitten to an older cat
stop a puppy from chewing shoes
trim a rabbit's claws
clean a fish tank
teach a parrot to say a word
bathe a dog that hates water
say no to a colleague without being rude
run a short team meeting
write a polite reminder
deal with a difficult customer
onboard a new colleague
keep my inbox under control
change a flat bicycle tyre
jump-start a car
check the oil in a car
tie a tie
whistle with two fingers
fold a paper boat
wrap an oddly shaped present
build a simple birdhouse
start a book club
organise a clothes swap
"""

SUBJECTS = """
photosynthesis
gravity
the water cycle
how a vaccine works
why the seasons change
how a rainbow forms
plate tectonics
black holes
the phases of the moon
how magnets work
what atoms are made of
natural selection
how the heart pumps blood
why we dream
how a battery stores energy
solar panels
how an aeroplane stays in the air
how a refrigerator cools
how a microwave oven works
electric current
the greenhouse effect
how tides work
how volcanoes erupt
what DNA does
how bees make honey
why leaves turn red in autumn
how birds find their way
echolocation in bats
what the internet is
how search engines work
what an algorithm is
machine learning
what an API is
how encryption keeps messages secret
what a database is
what a variable is in programming
recursion
what a for loop does
how wifi works
what open-source software means
inflation
interest rates
supply and demand
how a stock market works
what a mortgage is
what insurance is for
how taxes pay for roads
compound interest
what a budget deficit is
the French Revolution
the fall of the Roman Empire
the Silk Road
the Industrial Revolution
the Cold War
how the pyramids were built
the invention of printing
the Renaissance
what the United Nations does
how a law is made
what a constitution is
democracy
the right to privacy
what a metaphor is
the passive voice
what makes a good paragraph
the difference between irony and sarcasm
probability
what a prime number is
the Pythagorean theorem
what percentages mean
negative numbers
what pi is
the scientific method
what a placebo is
how muscles grow
what vitamins do
how sleep helps memory
why exercise is good for you
what stress does to the body
how glasses correct your eyesight
"""

AUDIENCES = """
a five-year-old
a ten-year-old
a teenager
my grandmother
a complete beginner
someone who has never heard of it
a busy manager
a high school student
a class of curious nine-year-olds
a friend who hates science
someone who is learning English
an adult who forgot everything from school
"""

PAIRS = """
a virus and a bacterium
weather and climate
a comet and an asteroid
a crocodile and an alligator
a rabbit and a hare
a butterfly and a moth
an arithmetic mean and a median
speed and acceleration
mass and weight
baking soda and baking powder
jam and marmalade
a latte and a cappuccino
stock and broth
butter and margarine
green tea and black tea
a vegan and a vegetarian diet
a debit card and a credit card
a stock and a bond
gross and net income
renting and leasing
a will and a trust
an interpreter and a translator
an architect and a civil engineer
a psychologist and a psychiatrist
a nurse and a paramedic
a college and a university
a simile and a metaphor
affect and effect
its and it's
fewer and less
a novel and a novella
a biography and a memoir
a republic and a monarchy
a civil case and a criminal case
a violin and a viola
a symphony and a concerto
oil paint and acrylic paint
yoga and pilates
aerobic and anaerobic exercise
a cold and the flu
a migraine and a headache
a sprain and a strain
a compiler and an interpreter
HTTP and HTTPS
a list and a tuple in Python
a router and a modem
a web page and a web app
Java and JavaScript
an email and an instant message at work
a manager and a leader
annual and perennial plants
a hurricane and a tornado
"""

PLANS = """
a birthday party for a six-year-old
a surprise dinner for my parents' anniversary
a three-day trip to {city}
a week in {city} with two small children
a road trip from {city} to {city2}
a rainy Sunday at home with the kids
a small garden wedding for {n:25-60/5} guests
a weekly meal schedule for a family of {n:3-6}
a training schedule for a half marathon
a study schedule for {n:3-6} exams in {m:three|four|five} weeks
a move to a new flat
a spring cleaning of the whole house
a farewell party for a colleague
a school trip to the zoo
a neighbourhood street party
a budget for a student who lives on {p:$600-1100/50} a month
a vegetable garden of {n:6-20/2} square metres
a home office in a tiny bedroom
a film night with friends
a picnic for {n:4-12} people
a daily routine for someone who works from home
a month of learning {lang:Spanish|Italian|Japanese|Portuguese|German}
a reading list for the summer
a workshop about saving energy
a charity run
a family reunion with {n:20-50/5} relatives
a first week in a new job
a camping weekend with teenagers
a balanced breakfast for every day of the week
a quiet weekend to recover from stress
a baby shower
a class project about recycling
a launch of a small online shop
a beginner workout at home without equipment
a winter holiday on a small budget
"""

CHOICES = """
working from home
living in a big city
living in the countryside
buying a used car
buying an electric car
renting instead of buying a home
owning a dog
keeping an aquarium
studying abroad
taking a gap year
going to bed early
learning to code at forty
being self-employed
a four-day work week
school uniforms
homework in primary school
online classes
reading on a screen instead of paper
shopping online
paying only with cash
having only one child
eating no meat
fasting for a day
travelling alone
package holidays
commuting by bike
sharing a flat with strangers
wood floors
a gas stove compared with induction
solar panels on the roof
nuclear power
wind farms near villages
social media for teenagers
video games for children
open-plan offices
switching careers at thirty-five
getting a second job
joining a gym
growing your own vegetables
adopting an older cat
"""

LETTERS = """
an email to my landlord about a broken boiler
an email to my teacher to ask for more time for an assignment
a letter of complaint about {object} that {flaw}
a cover letter for a job as a {job}
a short cover note for an application as a {job}
a thank-you note to a neighbour who watered the plants
a thank-you letter after a job interview
a resignation letter that stays friendly
a letter of recommendation for a former student named {name}
an invitation to a housewarming party on {day}
an invitation to {name}'s {n:30|40|50|60}th birthday
a wedding invitation for {name} and {name2}
an email to cancel a gym membership
an email to a hotel in {city} to ask for a late check-out
an email to invite the team to a meeting on {day} at {t:09:00-15:30}
an out-of-office message for {n:5-14} days in {month}
an apology to a friend whose birthday I forgot
an apology to a customer whose parcel is late
a condolence card for a colleague
a get-well message for {name}
a reminder to a customer about an unpaid invoice
a notice for the lift that the water is off on {day}
a lost-cat poster
an advert for {object} that I want to sell
a product description for {object}
a dating profile for a shy {job}
a short biography of a {job} named {name}
a speech for my sister's wedding
a toast for a retiring {job}
a welcome speech for new students
a letter to the mayor about dangerous traffic on {street}
a letter to my future self
a letter to the tooth fairy from a child
a postcard from {city}
a review of a cosy restaurant in {city}
a bad but polite review of a hotel in {city}
a social media post for a {shop} that opens on {day}
a newsletter for parents about the school fair in {month}
a text message to tell {name} that I will be late
an email to ask {name} for feedback on a report
a message to the neighbours about a party on {day}
a request for a refund for a cancelled flight to {city}
a note for the babysitter
a motivational message for a football team that lost
a slogan and a short text for a {shop}
"""

TONES = """
Keep it polite but firm.
Keep it short.
Make it warm and personal.
It should sound professional.
Not too formal, please.
Use simple words.
Add a subject line.
No more than 120 words.
A little humour is fine.
Sign it with {name} {surname}.
Mention that I am happy to answer questions.
Please leave blanks where I have to fill something in.
Write two versions.
"""

IDEAS = """
gifts for a father who likes fishing
gifts for a teenager who loves drawing
cheap date nights
things to do in {city} when it rains
healthy snacks for the office
lunches that a child can take to school
quick dinners with eggs
meals from one pot
ways to use leftover bread
names for a black cat
names for a small {shop}
names for a rock band
topics for a school presentation
science experiments for children
games for a long car ride
party games for adults
icebreakers for a first meeting
questions to ask at a job interview
questions to ask my grandparents about their life
hobbies for someone who has little money
hobbies for retired people
small habits that make the day better
ways to save electricity at home
ways to use less plastic
birds that you can see in a city
flowers that bloom in the shade
vegetables that are easy to grow
trees for a small garden
books for someone who never reads
films for a family evening
songs about the sea
journal prompts
drawing exercises for beginners
exercises for a stiff back
jobs for people who love animals
jobs that can be done from anywhere
side jobs for students
skills that employers look for
mistakes that first-time travellers make
things to pack for a week at the beach
tricks to teach a dog
low-maintenance pets
famous women in science
inventions that changed the world
interesting facts about octopuses
interesting facts about the moon
proverbs about patience
synonyms for the word "{w:happy|difficult|important|quick|beautiful|angry|strange}"
rhymes for the word "{w:light|river|dream|stone|winter|cat|road}"
reasons to learn a second language
ways to make a small room look bigger
warm-up activities for a language class
"""

QUESTIONS = """
Why is the sky blue?
Why do cats purr?
Why does bread go stale?
Why do onions make us cry?
Why is the sea salty?
Why do we yawn?
Why do leaves change colour in autumn?
Why does ice float?
Why do some people get seasick?
Why do stars twinkle?
Why do zebras have stripes?
Why do we have leap years?
What causes thunder?
What is the capital of Australia, and why is it not Sydney?
What happens when I swallow chewing gum?
What does a project manager do all day?
What did people eat in the Middle Ages?
What was daily life like in ancient Egypt?
What is the oldest city in the world?
What is a healthy blood pressure?
What is the best time of year to visit {city}?
What should I know before I adopt a dog?
What makes a good friend?
What is the meaning of the saying "a stitch in time saves nine"?
What would happen if the moon disappeared?
What is the longest river in the world, and which countries does it cross?
What are the three branches of government?
What are the main causes of the First World War?
What are the planets of the solar system, in order?
What are the symptoms of too little iron?
Who invented the telephone?
Who was Marie Curie, and what did she discover?
Who was Leonardo da Vinci?
Who wrote Don Quixote, and what is it about?
How old is the universe, and how do we know?
How do whales sleep?
How do chameleons change their colour?
How does soap work?
How many bones does a person have?
How much sleep does a teenager need?
How long does it take to learn a language?
How did the Vikings find their way at sea?
How is paper made?
How is glass recycled?
How is chocolate made?
How is cheese made from milk?
Is it bad to drink coffee every day?
Is it safe to eat eggs every day?
Is a tomato a fruit or a vegetable?
Are bananas radioactive?
Can plants hear?
Can you get sunburnt through a window?
Can dogs see colours?
Do fish sleep?
Does cracking my knuckles cause arthritis?
Does reading in the dark harm the eyes?
Which animals live the longest?
Which programming language should a beginner learn first?
Which countries have won the football World Cup?
Which foods contain a lot of protein?
Should I wash rice before I cook it?
Should I learn to type with ten fingers?
When was the Great Wall of China built?
When should children get their first phone?
Where does the word "salary" come from?
Where do rivers begin?
"""

# Somebody's situation, and what may be asked about it.
SITUATIONS = """
My neighbour plays loud music every night and I have to get up at five.
I moved to {city} a month ago and I don't know anybody here.
My daughter is {n:12-16} and spends all day on her phone.
My son is {n:6-9} and is afraid of swimming.
I have {n:3-6} exams next week and I have hardly studied.
I start a new job as a {job} on {day} and I am very nervous.
My boss never says anything good about my work.
A colleague keeps taking credit for my ideas.
I have been a {job} for {n:8-20} years and I want to do something new.
I was laid off last week after {n:4-18} years.
My best friend borrowed {p:$50-400/50} and never talks about it.
My partner and I argue about money all the time.
We are expecting our first baby in {month}.
My mother is {n:72-88} and lives alone on the third floor.
My father just retired and is bored at home.
I want to get a dog, but I work full time.
My cat wakes me up at four every morning.
Our dog barks whenever we leave the house.
My hamster stopped using its wheel.
The leaves of my monstera are turning yellow.
My tomatoes have black spots at the bottom.
Something is eating the leaves of my roses.
I have a balcony that gets sun only in the morning.
My lawn is full of moss and dandelions.
My phone battery is empty by noon.
My laptop gets very hot and the fan is loud.
The wifi in my bedroom keeps dropping.
I clicked on a strange link in an email and now I am worried.
I forgot the password of an old email account.
My spreadsheet has {n:3-9},000 rows and I have to find all the duplicates.
I want to learn programming, but I only have half an hour a day.
My Python script says "IndexError: list index out of range".
My website loads very slowly.
I have {p:$2000-9000/500} saved and don't know what to do with it.
I have two credit cards and about {p:$1500-6000/500} of debt.
My rent goes up by {n:8-20}% next month.
I would like to buy a used car for about {p:$3000-9000/500}.
I get headaches after working at the computer.
I cannot fall asleep before two in the morning.
My back hurts when I sit for a long time.
I would like to lose {n:4-12} kilos before the summer.
I want to start running, but I am out of breath after five minutes.
I drink {n:4-8} cups of coffee a day and want to cut down.
I catch a cold every month.
I am allergic to nuts and I am invited to a big dinner.
I have a lot of zucchini from the garden and no ideas.
I have eggs, potatoes, an onion and some cheese at home.
I burn everything I cook, and my parents visit on {day}.
My bread dough never rises.
I put too much salt into the soup.
We have {n:5-9} guests on {day} and two of them don't eat meat.
I am going to {city} for {n:2-6} days in {month}, and it is my first time there.
My flight to {city} was cancelled and I have to be there on {day}.
I lost my passport in {city}.
I get sick on boats, and we booked a day trip on the sea.
I have to give a presentation in front of {n:30-120/10} people.
I have to write an essay about {topic:climate change|friendship|social media|space travel|books} and don't know how to begin.
My handwriting is so bad that nobody can read it.
I am a teacher, and {n:3-5} of my pupils never do their homework.
I am learning {lang:French|English|German|Japanese|Arabic} and I never remember the words.
My child asks why people have to die.
My roommate never cleans the kitchen.
I was invited to a wedding, but I can hardly afford a present.
I broke a vase at a friend's house and haven't told her yet.
A friend has not answered my messages for {n:2-6} weeks.
I said something rude to my sister and I regret it.
I bought {object} online, and it {flaw}.
There is mould in the corner of my bathroom.
My washing machine smells bad.
Our flat is freezing in winter although the heating is on.
I have only {n:20-35} square metres and far too many things.
I would like to write a novel, but I never get past page {n:5-30}.
I started to play the piano at {n:35-60}, and my fingers feel slow.
I feel tired all day, although I sleep {n:7-9} hours.
"""  # noqa: E501

SITUATION_ASKS = """
What should I do?
What would you do in my place?
Do you have any advice?
Can you help me?
Any tips?
Where do I begin?
Please give me some ideas.
What are my options?
Give me a simple plan for the next week.
How can I deal with this?
Can you list the first five things I should try?
What could be the reason, and what can I do about it?
I don't have much time or money. What do you suggest?
Please tell me honestly what you think I should do.
What is the best way to handle this?
How do other people solve this?
"""

REWRITES = """
Make this sentence more polite: "Send me the {x:report|file|invoice|list} today."
Correct the grammar: "{name} don't likes to go at the {x:school|office|beach} when it rain."
Correct the mistakes in this sentence: "Yesterday we was going to {city} and {name} have forgot the tickets."
Rewrite this in simple English: "Pursuant to our conversation, kindly remit the outstanding sum at your earliest convenience."
Make this more exciting: "{name} opened the door and went into the {x:house|cave|shop|garden}."
Give me five sentences with the word "{x:although|despite|however|unless|meanwhile}".
What does the word "{x:serendipity|ambiguous|resilient|obsolete|empathy|frugal|nostalgia}" mean? Use it in two sentences.
Use the words {x:moon|river|candle|bread}, {y:key|coat|window|dog} and {z:silence|summer|ticket|hill} in one paragraph.
Write a haiku about {x:rain|snow|a cat|the sea|morning coffee|an empty street|autumn}.
Write a limerick about a {job} from {city}.
Write a riddle whose answer is {x:a shadow|an egg|a river|a clock tower|fire|a mirror|the wind}.
Tell me a joke about {x:a penguin|a computer|a teacher|a doctor|two tomatoes|a snail}.
Give me a quiz with {n:3-8} questions about {x:space|animals|Europe|food|sports|music|history} and put the answers at the end.
Pretend you are a {job}. Tell me about your day.
Pretend you are a tour guide in {city} and welcome my group.
Play the role of a {job} and give me advice about {x:my first house|my garden|my teeth|my health|my kitchen|my career}.
Summarise the story of {x:Cinderella|Romeo and Juliet|Little Red Riding Hood|Robinson Crusoe|Moby Dick} in {n:3-6} sentences.
Describe {x:a thunderstorm|a quiet library|a busy airport|an old kitchen|a frozen lake|a night in the desert} in {n:4-8} sentences.
Compare {x:tea and coffee|cats and dogs|books and films|trains and planes|summer and winter|email and letters} in a table.
Write a definition of {x:courage|friendship|success|home|freedom|luck} in your own words.
Write a recipe for {x:lentil soup|banana pancakes|a potato salad|apple crumble|fried rice|mushroom risotto|a fruit salad|onion soup|oat biscuits}, with a list of ingredients.
What can I cook with {x:rice|pasta|potatoes|beans|eggs} and {y:spinach|mushrooms|carrots|cheese|tuna|peppers}?
Make a table with the {x:planets|continents|months|vitamins|noble gases|oceans} and one fact about each.
Make a checklist for {x:moving house|a job application|a trip abroad|buying a used car|winterising a garden|a dinner party}.
Write an outline for an essay about {x:public transport|zoos|fast food|the history of writing|sleep|renewable energy|fairy tales}.
Write three paragraphs about {x:the history of tea|the life of bees|why people travel|the city of the future|the value of friendship|rivers}.
Write an introduction about {x:healthy eating|electric cars|dinosaurs|volunteering|jazz|chess} for a school magazine.
Give me arguments for and against {x:homework|zoos|free buses|phones in class|space travel|cars in city centres}.
"""  # noqa: E501

# Phrasings; {it} is the entry of the list above them.
CHAT_FORMS = {
    "how": """
How do I {it}?
how can i {it}
What is the best way to {it}?
Can you tell me how to {it}, step by step?
I have never had to {it} before. Where do I start?
I want to {it}. What do I need, and what are the steps?
Please explain how to {it}.
My friend asked me how to {it} and I had no idea. Can you explain it?
Give me {n:3-8} tips on how to {it}.
I tried to {it} last week and it went wrong. What are the most common mistakes?
Is there an easy way to {it}? I don't have any special tools.
Write a short guide: how to {it}.
I have to {it} by {day}. How long does that take, and how do I do it?
What should I avoid when I want to {it}?
""",
    "explain": """
Explain {it} to {audience}.
Can you explain {it} in simple terms?
Can you explain {it} to {audience}? Please use an example from everyday life.
I never understood {it}. Please explain it as if I were {audience}.
I have to talk about {it} in class. Give me the most important points.
Write a short paragraph about {it} for {audience}.
Tell me about {it}.
please explain {it}, i have a test about it on {day}
Explain {it} in {n:3-6} sentences.
What are the most common misunderstandings about {it}?
Make a list of the key words that I need to understand {it}, with a short definition of each.
""",
    "difference": """
What is the difference between {it}?
What's the difference between {it}? Please give an example of each.
I always mix up {it}. How can I tell them apart?
Explain the difference between {it} to {audience}.
Compare {it} in a short table.
difference between {it}?
My teacher asked about {it} today. How do they differ, and what do they have in common?
""",
    "plan": """
Help me plan {it}.
Can you plan {it} for me? Please make a list with days or times.
I have to organise {it} and I don't know where to start.
Make a checklist for {it}.
I need ideas for {it}. It should not cost much.
Plan {it}. We have {p:$100-900/50} and not much time.
What do I have to think of when I plan {it}?
Write a simple timetable for {it}.
""",
    "pros": """
What are the pros and cons of {it}?
What are the advantages and disadvantages of {it}?
I am thinking about {it}. Is it a good idea?
My family disagrees about {it}. Give me {n:3-5} arguments for and {n} against.
Is {it} worth it?
Write a balanced paragraph about {it}.
Give me your opinion about {it}, with reasons.
pros and cons of {it}, as two lists please
""",
    "letter": """
Write {it}.
Please write {it}. {tone}
Can you help me write {it}? {tone}
I need {it}. {tone}
Draft {it} for me. My name is {name3} {surname3}. {tone}
I am not good at writing. Could you write {it}? {tone}
write {it} please
""",
    "ideas": """
Give me {n:5-12} {it}.
Can you list some {it}?
I am looking for {it}. Can you suggest some, with one sentence for each?
List {n:5-10} {it} and explain why you chose them.
What are some {it}?
I need {it}, the more unusual the better.
{n:5-15} {it} please
Make a numbered list of {it}.
""",
    "question": """
{it}
{it} Please answer in {n:2-5} sentences.
{it} Explain it to {audience}.
My daughter asked me this today and I didn't know: {it}
{it} I have heard different answers.
I have always wondered about this. {it}
{it} Is there a simple explanation?
""",
    "situation": """
{it} {asking}
""",
    "rewrite": """
{it}
""",
}

CHAT_TAILS = """
Keep the answer short.
Use bullet points.
Please give examples.
No jargon, please.
Thanks!
Thank you in advance.
A few sentences are enough.
Please be detailed.
Explain your reasoning.
I am a beginner.
Answer in plain English.
"""

CHAT_OPENINGS = """
Hi!
Hello!
Hey there,
Good morning!
Quick question:
I hope you can help me.
I have a question.
Hi, I need some help.
"""

# ----------------------------------------------------------------------------------------- story

CHARACTERS = """
a retired sea captain
a girl who collects maps
a nervous young wizard
a talking crow
an old piano teacher
a boy who cannot lie
a baker who never sleeps
a lonely giant
a small dragon with a cold
a postman in the mountains
a fox who wants to learn to read
a princess who prefers tools to dresses
two brothers who run a circus
a beekeeper and her grandson
a pirate who is afraid of water
a shy ghost
a nurse on the night shift
an honest thief
a squirrel with a bad memory
a queen without a kingdom
a taxi driver in {city}
a chess player named {man}
an inventor named {woman}
a goat that escaped from a farm
a gardener who talks to trees
a knight who hates fighting
a snail who dreams of winning a race
three sisters who own an inn
a deaf dog and its owner
a painter who has lost her sight
an astronaut on her last flight
a mouse who lives in a theatre
a violinist without a violin
a weather forecaster who is always wrong
a translator of forgotten languages
a young fisherman
a grandmother who was once a spy
a child who moved to a new town
a librarian with a secret
a mermaid who wants to climb a mountain
a bus driver named {woman}
a farmer and his stubborn donkey
a cloud that is afraid of heights
a tailor who sews with moonlight
a night watchman at a museum
a cat who thinks it is a lion
twins who can hear each other's thoughts
an owl who is tired of giving advice
a puppet that wants to be free
a blacksmith's daughter
a doctor in a small village
a magician who has forgotten the last trick
a penguin who hates the cold
a student who cannot remember yesterday
a soldier on the way home
a bear who opens a honey shop
a ferryman's widow
a journalist named {name}
a street musician
an apprentice cook
a turtle who carries a library on its back
a mayor who cannot say no
a rabbit who is never late
a prince who was raised by wolves
a cleaning lady at a palace
a lighthouse keeper's cat
a monster under the bed
a retired teacher named {woman}
a boy named {man} who stutters
a girl named {woman} who has never seen snow
a gravedigger who writes poems
an old elephant
a carpenter who builds doors
a time traveller with a broken watch
a dentist for animals
a tree that can walk
a detective who is only {n:9-12} years old
a scarecrow
a spider who spins words
a merchant who sells dreams
a football coach named {man}
a polar explorer
an orphan named {woman}
"""

SETTINGS = """
in a village at the edge of the desert
on a houseboat
in a castle with a hundred locked rooms
in a pottery before sunrise
in a city under the sea
on the top floor of a very tall tower
in an abandoned amusement park
in a forest where it never stops raining
on a small farm in {month}
at a bus stop in the middle of nowhere
in a library that is open only at night
in a hospital during a power cut
in a lighthouse in winter
on a mountain pass in a snowstorm
in a crowded railway station
in {city} in the year {y:2090-2400/10}
in {city} a hundred years ago
in a school for dragons
in a hotel with only one guest
in an old cinema
on a raft in the middle of a lake
in a tiny flat above a shop
in a garden behind a high wall
in a kingdom without music
in the attic of a grandmother's house
in a small town called {town}
at the bottom of a dry well
in a theatre on opening night
on a planet with two suns
in a museum after closing time
at a carnival in the rain
in a monastery high in the hills
in a laundromat at midnight
on an iceberg that drifts south
in the kitchen of a palace
in a jungle full of ruins
in a sleepy fishing harbour
at an airport during a strike
in a cave behind a waterfall
in a treehouse
in a village where nobody speaks
on the last day of summer holidays
in an orchard in spring
in a submarine
in a courtroom for animals
in a town that is not on any map
at the edge of a volcano
in a toy factory
on a long road through the prairie
in a post office in the Arctic
on a bridge between two countries
in a greenhouse on the moon
in a house that moves at night
at a wedding where something goes wrong
in a swamp full of lights
in a shop that sells only umbrellas
during the longest night of the year
in an empty football stadium
in a salt mine
in a little tea house by the river
on a street where every house is blue
"""

THINGS = """
a rusty key
a map with a missing corner
a music box
a silver spoon
a diary without an owner
a red umbrella
a jar of stars
a broken compass
a coat that makes its wearer invisible
a suitcase full of sand
a photograph from the future
a lost glove
a golden egg
a telephone that is not connected
a wooden flute
a mirror that tells the truth
a bottle with a message
a chessboard with one piece missing
a recipe book
a lantern that never goes out
a ring that is too small
a pair of red boots
a seed that glows
a sealed envelope
a blue feather
a bell without a sound
a cake that nobody may eat
a half-finished painting
a ticket to a place that does not exist
a stone that hums
a box that must not be opened
a train set
a book with empty pages
a whistle that only animals hear
a necklace of shells
a kite
a wheelbarrow
an old radio
a violin with three strings
a paper crown
a bag of buttons
a snow globe
a ladder that leads into the clouds
a carpet with a strange pattern
a clay bird
a list of names
a teacup with a crack
a wishing coin
a door without a house
a glass eye
a spare moon
a bicycle with square wheels
a loaf of bread
a walking stick
a secret recipe
a letter that was never sent
a candle that burns backwards
a hat that is far too big
a ball of wool
a pocket full of acorns
"""

TWISTS = """
nothing is what it seems
the villain turns out to be a friend
it was all a misunderstanding
the smallest one saves the day
somebody has to tell the truth at last
two old enemies have to work together
a promise is broken
time starts to run backwards
a stranger knows everybody's name
the weather changes everything
somebody comes back after many years
the treasure is not gold
a wish goes wrong
a secret is found out at dinner
someone has to choose between two friends
a mistake turns into something wonderful
the hero gives up the prize
everyone is asleep except one person
an animal begins to speak
a small lie grows bigger and bigger
someone learns to say sorry
there is a storm on the way
a door opens that was always locked
the map turns out to be a joke
a song brings back a memory
the narrator is not telling the truth
a guest does not want to leave
the last page is missing
somebody takes the wrong bag
a birthday has been forgotten
the lights go out
a competition is won by the wrong person
someone finds out that they are adopted
the moon does not rise
a gift is given away three times
an old debt has to be paid
the ending is happy, but nobody expected it
someone discovers a hidden talent
a shadow goes its own way
two strangers find out that they are related
the journey ends where it began
nobody believes the only witness
"""

# {who}, {who2}: characters; {where}: setting; {thing}: object; {twist}: twist.
STORY_FORMS = """
Write a short story about {who} {where}.
Write a short story about {who} who finds {thing}.
Write a story about {who} and {who2}. It takes place {where}.
Tell me a story about {who}. In the end, {twist}.
Tell me a bedtime story about {who} and {thing}.
Write a bedtime story for a {n:3-7}-year-old about {who}.
Write a fable about {who} and {who2}, with a moral at the end.
Write a fairy tale in which {who} loses {thing}.
Write the opening of a {genre} set {where}. The main character is {who}.
Write the first paragraph of a {genre} about {who}.
Write the last page of a {genre} about {who} and {thing}.
Write a scene in which {who} and {who2} meet for the first time {where}.
Write a scene {where}. {who} has just found {thing}, and {twist}.
Write a dialogue between {who} and {who2} about {thing}.
Write a conversation between {who} and {who2} who are stuck {where}.
Write a poem about {who}.
Write a poem about {thing}, in {n:3-5} verses.
Write a rhyming poem about {who} {where}.
Write a letter from {who} to {who2}.
Write a diary entry of {who} {where}.
Write a {mood} story about {who} in about {w:100|150|200|250|300} words.
Write a {mood} story that begins with the words "{first}"
Continue this story: "{first}"
Here is the first sentence of a story: "{first}" Please write the rest. The hero is {who}.
Write a {genre} in three short chapters about {who} and {thing}.
Give me a plot outline for a {genre} about {who} {where}. At some point, {twist}.
Write a monologue of {who} who has lost {thing}.
Write a short play with two parts: {who} and {who2}. The place: {where}.
Describe {who} in a paragraph, as in a novel.
Describe the place of a story that happens {where}. Make it {mood}.
Make up a legend that explains why {why}.
Write a funny newspaper article about {who} and {thing}.
Write a song about {who}, with a chorus.
I need a {mood} story for my children. They like {who} and {thing}.
My students should read a short story in easy English. Write one about {who} {where}.
Can you write me a {mood} tale? It should have {who} in it, and {thing}, and {twist}.
Rewrite the tale of the tortoise and the hare with {who} and {who2}.
Once upon a time there was {who}. Go on from here.
Write a story from the point of view of {thing}. It belongs to {who}.
Write a story of {n:4-10} sentences about {who}.
"""

STORY_TAILS = """
Make it funny.
Make it a little sad.
Give it a happy ending.
Use simple words.
Use a lot of dialogue.
Write in the first person.
Keep it under {w:120|150|180|250|300} words.
Give it a title.
Write in the present tense.
End with a question.
In the middle of the story, {twist}.
It should teach children that {moral}.
"""

STORY_LISTS = {
    "mood": (
        "funny|sad|scary|gentle|mysterious|hopeful|strange|romantic|exciting|quiet|silly|dark|"
        "heart-warming|dreamy|tense"
    ),
    "genre": (
        "mystery|science fiction story|ghost story|love story|fantasy novel|adventure story|"
        "historical novel|comedy|thriller|children's book|western|crime novel|magical tale"
    ),
    "first": """
The rain had not stopped for nine days.
Nobody in {town} remembered who had built the tower.
'You are late,' said the {x:fox|old woman|stranger|captain|statue}.
On the morning of my {n:11-19}th birthday, the river ran backwards.
{name} found the door on a {day}.
There was one rule in our house.
The {x:map|letter|box|ticket} was addressed to someone who had died long ago.
It began with a {x:whisper|knock|phone call|smell of smoke|broken window}.
Every evening at {x:six|seven|nine|ten}, the man on the bench fed birds that nobody else could see.
{name} had never told a lie until that {day}.
The last bus to {town} left without a driver.
When the snow melted, we found the {x:car|statue|piano|boat}.
I did not mean to steal the {x:horse|cake|painting|parrot}.
My grandfather kept {thing} in the cellar.
The {x:king|mayor|doctor|headmaster} laughed, and then he stopped.
""",
    "why": (
        "cats hate water|the moon changes its shape|the sea is salty|owls are awake at night|"
        "spiders live in corners|bears sleep in winter|roosters crow in the morning|"
        "zebras have stripes|the wind howls|snails are slow|the giraffe has a long neck|"
        "dogs chase cats|stars fall from the sky|leaves fall in autumn"
    ),
    "moral": (
        "sharing is important|it is fine to be different|patience pays off|lies have short legs|"
        "courage can be quiet|friends help each other|everyone makes mistakes|"
        "small things matter|it is good to ask for help|nobody is too small to help"
    ),
}

# ------------------------------------------------------------------------------------------ code

# Class, item, items, a number of the item, a text of the item.
DOMAINS = """
Playlist track tracks seconds artist
Library book books pages author
Garden plant plants height species
Fleet vehicle vehicles mileage plate
Zoo animal animals weight name
Cinema screening screenings seats title
Recipe ingredient ingredients grams label
Roster player players score nickname
Gallery picture pictures width painter
Menu dish dishes calories title
Classroom student students grade surname
Calendar event events minutes title
Budget expense expenses amount category
Timetable lesson lessons minutes subject
Harbour ship ships tonnage flag
Museum exhibit exhibits year period
Backlog task tasks priority assignee
Clinic patient patients age surname
Airline flight flights distance destination
Mailbox message messages size sender
Orchestra instrument instruments strings section
Survey answer answers rating question
Archive document documents size folder
Festival concert concerts visitors band
Workshop tool tools price brand
Tournament game games points winner
Observatory star stars brightness constellation
Weatherlog reading readings degrees station
Pharmacy medicine medicines dose brand
Campsite tent tents guests owner
Laboratory sample samples volume colour
Portfolio share shares price symbol
Dictionary entry entries frequency word
Hotel suite suites price floor
Aquarium fish fishes length species
Newsroom article articles views editor
Vineyard barrel barrels litres grape
Gradebook quiz quizzes points topic
Kennel dog dogs age breed
Inbox ticket tickets urgency customer
"""

# Language -> how a class starts and ends; %Class%, %item%, %items%, %num%, %text% are of DOMAINS.
CLASS_FRAMES = {
    "python": (
        'class %Class%:\n    """The %class% and its %items%."""\n\n'
        "    def __init__(self, name):\n        self.name = name\n        self.%items% = []\n",
        "",
    ),
    "js": (
        "class %Class% {\n  constructor(name) {\n    this.name = name;\n"
        "    this.%items% = [];\n  }\n",
        "}",
    ),
    "java": (
        "public class %Class% {\n    private final String name;\n"
        "    private final List<%Item%> %items% = new ArrayList<>();\n\n"
        "    public %Class%(String name) {\n        this.name = name;\n    }\n",
        "}",
    ),
    "go": (
        "package %class%\n\ntype %Item% struct {\n\t%Text% string\n\t%Num% float64\n}\n\n"
        "type %Class% struct {\n\tName string\n\t%Items% []%Item%\n}\n",
        "",
    ),
    "c": (
        "#include <stdbool.h>\n#include <string.h>\n\n#define MAX_%ITEMS% %limit%\n\n"
        "struct %item% {\n    char %text%[32];\n    double %num%;\n};\n\n"
        "struct %class% {\n    struct %item% %items%[MAX_%ITEMS%];\n    int count;\n};\n",
        "",
    ),
    "sql": (
        "CREATE TABLE %items% (\n    id INTEGER PRIMARY KEY,\n    %text% TEXT NOT NULL,\n"
        "    %num% REAL\n);\n",
        "",
    ),
}

# What a method or query does -> its name, a description, and its code by language.
METHODS = {
    "add_%item%": (
        "adds one %item%",
        {
            "python": "    def add_%item%(self, %item%):\n        self.%items%.append(%item%)\n",
            "js": "  add%Item%(%item%) {\n    this.%items%.push(%item%);\n    return this;\n  }\n",
            "java": "    public void add%Item%(%Item% %item%) {\n"
            "        %items%.add(%item%);\n    }\n",
            "go": "func (x *%Class%) Add%Item%(item %Item%) {\n"
            "\tx.%Items% = append(x.%Items%, item)\n}\n",
            "c": "bool add_%item%(struct %class% *x, struct %item% item)\n{\n"
            "    if (x->count == MAX_%ITEMS%)\n        return false;\n"
            "    x->%items%[x->count++] = item;\n    return true;\n}\n",
            "sql": "INSERT INTO %items% (id, %text%, %num%) VALUES (1, '%word1%', %number1%);\n"
            "INSERT INTO %items% (id, %text%, %num%) VALUES (2, '%word2%', %number2%);\n",
        },
    ),
    "remove_%item%": (
        "removes every %item% with a given %text%",
        {
            "python": "    def remove_%item%(self, %text%):\n        self.%items% = "
            "[x for x in self.%items% if x.%text% != %text%]\n",
            "js": "  remove%Item%(%text%) {\n    this.%items% = this.%items%.filter((x) => "
            "x.%text% !== %text%);\n  }\n",
            "java": "    public void remove%Item%(String %text%) {\n        %items%.removeIf(x -> "
            "x.get%Text%().equals(%text%));\n    }\n",
            "sql": "DELETE FROM %items% WHERE %text% = '%word1%';\n",
        },
    ),
    "find_%item%": (
        "finds the first %item% with a given %text%",
        {
            "python": "    def find_%item%(self, %text%):\n        for %item% in self.%items%:\n"
            "            if %item%.%text% == %text%:\n                return %item%\n"
            "        return None\n",
            "js": "  find%Item%(%text%) {\n    return this.%items%.find((x) => x.%text% === "
            "%text%);\n  }\n",
            "java": "    public %Item% find%Item%(String %text%) {\n"
            "        for (%Item% x : %items%) {\n"
            "            if (x.get%Text%().equals(%text%)) {\n                return x;\n"
            "            }\n        }\n        return null;\n    }\n",
            "go": "func (x *%Class%) Find%Item%(%text% string) *%Item% {\n"
            "\tfor i := range x.%Items% {\n\t\tif x.%Items%[i].%Text% == %text% {\n"
            "\t\t\treturn &x.%Items%[i]\n\t\t}\n\t}\n\treturn nil\n}\n",
            "c": "int find_%item%(const struct %class% *x, const char *%text%)\n{\n"
            "    for (int i = 0; i < x->count; i++)\n"
            "        if (strcmp(x->%items%[i].%text%, %text%) == 0)\n            return i;\n"
            "    return -1;\n}\n",
            "sql": "SELECT * FROM %items% WHERE %text% = '%word2%';\n",
        },
    ),
    "total_%num%": (
        "returns the sum of %num% over all %items%",
        {
            "python": "    def total_%num%(self):\n        total = 0\n"
            "        for %item% in self.%items%:\n            total += %item%.%num%\n"
            "        return total\n",
            "js": "  total%Num%() {\n    let total = 0;\n    for (const %item% of this.%items%) {\n"
            "      total += %item%.%num%;\n    }\n    return total;\n  }\n",
            "java": "    public double total%Num%() {\n        double total = 0;\n"
            "        for (%Item% x : %items%) {\n            total += x.get%Num%();\n        }\n"
            "        return total;\n    }\n",
            "go": "func (x *%Class%) Total%Num%() float64 {\n\ttotal := 0.0\n"
            "\tfor _, item := range x.%Items% {\n\t\ttotal += item.%Num%\n\t}\n"
            "\treturn total\n}\n",
            "c": "double total_%num%(const struct %class% *x)\n{\n    double total = 0;\n\n"
            "    for (int i = 0; i < x->count; i++)\n        total += x->%items%[i].%num%;\n"
            "    return total;\n}\n",
            "sql": "SELECT SUM(%num%) AS total FROM %items%;\n",
        },
    ),
    "average_%num%": (
        "returns the average %num% of the %items%",
        {
            "python": "    def average_%num%(self):\n        if not self.%items%:\n"
            "            return 0\n"
            "        return sum(x.%num% for x in self.%items%) / len(self.%items%)\n",
            "js": "  average%Num%() {\n"
            "    if (this.%items%.length === 0) {\n      return 0;\n    }\n"
            "    const sum = this.%items%.reduce((total, x) => total + x.%num%, 0);\n"
            "    return sum / this.%items%.length;\n  }\n",
            "java": "    public double average%Num%() {\n        return %items%.stream()"
            ".mapToDouble(%Item%::get%Num%).average().orElse(0);\n    }\n",
            "sql": "SELECT %text%, AVG(%num%) AS average\nFROM %items%\nGROUP BY %text%;\n",
        },
    ),
    "highest_%num%": (
        "returns the %item% with the highest %num%",
        {
            "python": "    def highest_%num%(self):\n"
            "        return max(self.%items%, key=lambda x: x.%num%)\n",
            "js": "  highest%Num%() {\n    let best = null;\n    for (const x of this.%items%) {\n"
            "      if (best === null || x.%num% > best.%num%) {\n        best = x;\n      }\n"
            "    }\n    return best;\n  }\n",
            "go": "func (x *%Class%) Highest%Num%() float64 {\n\tbest := 0.0\n"
            "\tfor _, item := range x.%Items% {\n\t\tif item.%Num% > best {\n"
            "\t\t\tbest = item.%Num%\n\t\t}\n\t}\n\treturn best\n}\n",
            "c": "double highest_%num%(const struct %class% *x)\n{\n    double best = 0;\n\n"
            "    for (int i = 0; i < x->count; i++)\n        if (x->%items%[i].%num% > best)\n"
            "            best = x->%items%[i].%num%;\n    return best;\n}\n",
            "sql": "SELECT * FROM %items% ORDER BY %num% DESC LIMIT 1;\n",
        },
    ),
    "count_%items%": (
        "returns how many %items% there are",
        {
            "python": "    def count_%items%(self):\n        return len(self.%items%)\n",
            "js": "  count%Items%() {\n    return this.%items%.length;\n  }\n",
            "java": "    public int count%Items%() {\n        return %items%.size();\n    }\n",
            "go": "func (x *%Class%) Count%Items%() int {\n\treturn len(x.%Items%)\n}\n",
            "sql": "SELECT COUNT(*) FROM %items%;\n",
        },
    ),
    "%items%_above": (
        "returns the %items% whose %num% is above a limit",
        {
            "python": "    def %items%_above(self, limit):\n"
            "        return [x for x in self.%items% if x.%num% > limit]\n",
            "js": "  %items%Above(limit) {\n"
            "    return this.%items%.filter((x) => x.%num% > limit);\n  }\n",
            "go": "func (x *%Class%) %Items%Above(limit float64) []%Item% {\n"
            "\tvar found []%Item%\n\tfor _, item := range x.%Items% {\n"
            "\t\tif item.%Num% > limit {\n\t\t\tfound = append(found, item)\n\t\t}\n\t}\n"
            "\treturn found\n}\n",
            "c": "int count_above(const struct %class% *x, double limit)\n{\n    int found = 0;\n\n"
            "    for (int i = 0; i < x->count; i++)\n        if (x->%items%[i].%num% > limit)\n"
            "            found++;\n    return found;\n}\n",
            "sql": "SELECT %text%, %num%\nFROM %items%\nWHERE %num% > %limit%\nORDER BY %text%;\n",
        },
    ),
    "by_%text%": (
        "groups the %items% by %text%",
        {
            "python": "    def by_%text%(self):\n        groups = {}\n"
            "        for %item% in self.%items%:\n"
            "            groups.setdefault(%item%.%text%, []).append(%item%)\n"
            "        return groups\n",
            "js": "  by%Text%() {\n    const groups = new Map();\n"
            "    for (const x of this.%items%) {\n"
            "      const group = groups.get(x.%text%) ?? [];\n      group.push(x);\n"
            "      groups.set(x.%text%, group);\n    }\n    return groups;\n  }\n",
            "sql": "SELECT %text%, COUNT(*) AS how_many\nFROM %items%\nGROUP BY %text%\n"
            "HAVING COUNT(*) > 1;\n",
        },
    ),
    "report": (
        "builds a text with one line for each %item%",
        {
            "python": "    def report(self):\n        lines = [self.name]\n"
            "        for %item% in self.%items%:\n"
            '            lines.append(f"{%item%.%text%}: {%item%.%num%}")\n'
            '        return "\\n".join(lines)\n',
            "js": "  report() {\n    const lines = this.%items%.map((x) => "
            "`${x.%text%}: ${x.%num%}`);\n"
            '    return [this.name, ...lines].join("\\n");\n  }\n',
            "java": "    public String report() {\n        StringBuilder text = new StringBuilder("
            "name);\n        for (%Item% x : %items%) {\n            text.append('\\n')."
            "append(x.get%Text%());\n        }\n        return text.toString();\n    }\n",
        },
    ),
}

# Code that is no class, by language; the names as above.
SNIPPETS = {
    "python": [
        "import csv\n\n\ndef load_%items%(path):\n    %items% = []\n    with open(path) as file:\n"
        "        for row in csv.DictReader(file):\n"
        "            row['%num%'] = float(row['%num%'])\n"
        "            %items%.append(row)\n    return %items%\n\n\n"
        "def print_%items%(%items%):\n    for %item% in %items%:\n"
        "        print(%item%['%text%'], %item%['%num%'])\n",
        "%items% = {\n    '%word1%': %number1%,\n    '%word2%': %number2%,\n}\n\n"
        "total = 0\nfor %text%, %num% in %items%.items():\n    if %num% > %limit%:\n"
        "        print(%text%, 'is above the limit')\n    total = total + %num%\n"
        "print('total:', total)\n",
        "import random\n\n%NUM%_LIMIT = %limit%\n\n\ndef choose_%item%(%items%):\n"
        "    good = []\n    for i in range(len(%items%)):\n"
        "        if %items%[i]['%num%'] < %NUM%_LIMIT:\n            good.append(%items%[i])\n"
        "    if len(good) == 0:\n        return None\n    else:\n"
        "        return random.choice(good)\n",
    ],
    "js": [
        "async function load%Items%(url) {\n  const response = await fetch(url);\n"
        "  const data = await response.json();\n  return data.%items%;\n}\n\n"
        "function show%Items%(%items%) {\n  const list = document.querySelector('#%items%');\n"
        "  for (const %item% of %items%) {\n    const entry = document.createElement('li');\n"
        "    entry.textContent = %item%.%text%;\n    list.append(entry);\n  }\n}\n",
        "var %items% = [\n  { %text%: '%word1%', %num%: %number1% },\n"
        "  { %text%: '%word2%', %num%: %number2% },\n];\n\nvar total = 0;\n"
        "for (var i = 0; i < %items%.length; i++) {\n  total = total + %items%[i].%num%;\n}\n"
        "console.log('Total %num%: ' + total);\n",
    ],
    "html": [
        "<!DOCTYPE html>\n<html>\n<head>\n  <title>%Class%</title>\n</head>\n<body>\n"
        '  <h1>Our %items%</h1>\n  <ul class="%items%">\n    <li>%word1%</li>\n'
        '    <li>%word2%</li>\n  </ul>\n  <a href="/%items%/new">New %item%</a>\n'
        "</body>\n</html>\n",
        '<form action="/%items%" method="post">\n  <label for="%text%">%Text%</label>\n'
        '  <input id="%text%" name="%text%" type="text">\n'
        '  <label for="%num%">%Num%</label>\n'
        '  <input id="%num%" name="%num%" type="number" max="%limit%">\n'
        "  <button>Save</button>\n</form>\n",
    ],
    "css": [
        ".%class% {\n  margin: 0 auto;\n  max-width: %limit%px;\n}\n\n"
        ".%class% .%item% {\n  color: navy;\n  padding: 8px;\n}\n\n"
        ".%class% .%item%:hover {\n  background: lightyellow;\n}\n",
    ],
    "bash": [
        '#!/bin/bash\nsource="$HOME/%items%"\ntarget="/backup/%class%"\n\nmkdir -p "$target"\n'
        'for file in "$source"/*.txt; do\n  echo "copying $file"\n  cp "$file" "$target"\ndone\n'
        'echo "done"\n',
    ],
    "json": [
        '{\n  "name": "%class%",\n  "limit": %limit%,\n  "%items%": [\n'
        '    {"%text%": "%word1%", "%num%": %number1%},\n'
        '    {"%text%": "%word2%", "%num%": %number2%}\n  ]\n}\n',
    ],
}

SNIPPET_TASKS = """
Rename `%num%` to `%num%_value` everywhere and show all of it.
Replace "%item%" by "record" and "%items%" by "records" everywhere. Print the result.
Replace '%word1%' by '%word2%' and print it again.
Change the limit of %limit% to %number1% and print everything again.
Format this nicely and add comments where they help.
Add one more %item% and show the complete code.
Explain what this does, and then write a better version.
Is there a mistake in this? Please correct it and show me the whole thing.
Add a second number called `rank` next to `%num%`.
Make this more robust.
I get an error when there are no %items%. How do I fix it?
"""

LANGUAGES = {
    "python": ("Python", "class"),
    "js": ("JavaScript", "class"),
    "java": ("Java", "class"),
    "go": ("Go", "file"),
    "c": ("C", "file"),
    "sql": ("SQL", "script"),
}

# %lang% and %what% are of LANGUAGES; %wanted% and %does% are a method that is not in the code yet.
EDIT_TASKS = {
    "any": """
Add a comment above every part that says what it does.
Rename `%num%` to `%num%_value` everywhere and show the whole %what%.
Rename `%text%` to `%text%_name` and print the complete code.
Change the word "%item%" to "entity" in all names. Return the full code.
Clean up this code without changing what it does.
Find possible bugs in this %lang% code and fix them.
Please review this code and show an improved version.
Add a part that %does%, and show me everything.
Explain this code line by line, then make it shorter.
Add something that %does%. Leave the rest as it is.
""",
    "class": """
Rename the class to `%Class%Manager` and show all of it.
Add a method `%wanted%` that %does%. Print the whole class.
Please add the method `%wanted%`, which %does%, and don't change the other methods.
Write unit tests for this class.
Write three tests for the last method.
Add error handling: no method should accept an empty %text%.
Make the name of the %class% optional.
Make every method print a line when it is called.
Move the methods into alphabetical order.
Add a method that %does% and one that empties the list of %items%.
""",
    "python": """
Add docstrings to all methods.
Add type hints to every method and show the result.
Raise a ValueError when a `%num%` is negative.
Turn this into a dataclass where that makes sense.
Write pytest tests for it.
Add a `__repr__` and a `__len__` method.
""",
    "js": """
Convert this class to TypeScript.
Add JSDoc comments to all methods.
Throw an Error when `%text%` is missing.
""",
    "java": """
Add Javadoc to all public methods.
Make it safe to use from several threads.
Throw an IllegalArgumentException for null arguments.
""",
    "go": """
Add a doc comment to every exported name.
Return an error instead of nothing where something can fail.
Write a table-driven test for it.
""",
    "c": """
Change the limit MAX_%ITEMS% to %number1% and show the file again.
Check every pointer for NULL.
Write a small main function that uses it.
""",
    "sql": """
Add a column `created` of type DATE to the table and print the script again.
Rename the table `%items%` to `old_%items%` in the whole script.
Add an index on `%text%`.
Add three INSERT statements with values that make sense.
Write all SQL key words in lower case.
""",
}

COMPLETION_TASKS = """
Complete the code. The last part is missing: `%wanted%` %does%.
Finish this %lang% %what% by writing `%wanted%`, which %does%.
Write only the missing part `%wanted%`. It %does%.
Continue this code with something that %does%.
What is missing here is `%wanted%`: it %does%. Please write it in the same style.
"""

# A function to write: its name, its parameters, and what it does.
FUNCTIONS = """
is_leap_year|year|returns whether a year is a leap year
count_vowels|text|counts the vowels in a text
is_palindrome|text|tells whether a text reads the same backwards
factorial|n|computes the factorial of n
fibonacci|n|returns the first n Fibonacci numbers
greatest_common_divisor|a, b|computes the greatest common divisor of two numbers
is_prime|n|tells whether n is a prime number
primes_below|limit|lists all primes below a limit
celsius_to_fahrenheit|degrees|converts Celsius to Fahrenheit
clamp|value, low, high|keeps a value between low and high
median|numbers|returns the median of a list of numbers
second_largest|numbers|returns the second largest number of a list
merge_sorted|left, right|merges two sorted lists into one
binary_search|numbers, wanted|finds the index of a number in a sorted list, or -1
bubble_sort|numbers|sorts a list with bubble sort
rotate|items, steps|moves the items of a list to the left by some steps
flatten|lists|turns a list of lists into one list
transpose|matrix|swaps the rows and columns of a matrix
zip_longest|left, right, fill|pairs up two lists and fills the shorter one
caesar_cipher|text, shift|moves every letter of a text by a shift
is_anagram|first, second|tells whether two words are anagrams
title_case|text|makes the first letter of every word upper case
snake_to_camel|name|turns snake_case into camelCase
slugify|title|makes a title fit for a web address
truncate|text, length|cuts a text to a length and adds three dots
most_common_letter|text|returns the letter that occurs most often
longest_word|sentence|returns the longest word of a sentence
parse_duration|text|turns a text such as "2h 15m" into minutes
format_money|cents, symbol|formats an amount of cents as text
days_between|start, end|counts the days between two dates
roman_to_int|numeral|converts a Roman numeral to a number
to_binary|n|writes a number in binary
digit_sum|n|adds up the digits of a number
is_valid_email|address|does a simple check of an email address
password_strength|password|rates a password from 0 to 4
running_total|numbers|returns the sums of all beginnings of a list
moving_average|numbers, width|returns the moving average over a window
find_missing|numbers, n|finds the number from 1 to n that is missing
two_sum|numbers, target|finds two numbers that add up to a target
invert|mapping|swaps the keys and values of a mapping
read_config|path|reads lines such as key=value from a file
count_lines|path|counts the lines of a text file that are not empty
retry|action, attempts|runs an action again until it works
shuffle|cards, seed|shuffles a deck of cards
dice_roll|sides, times|rolls a die several times and returns the results
tax|income, rate|computes the tax on an income, rounded to cents
grade|points|turns points from 0 to 100 into a letter from A to F
distance|x1, y1, x2, y2|computes the distance between two points
bmi|weight, height|computes the body mass index
compress|text|replaces runs of the same letter by the letter and a number
balanced|text|checks whether the brackets in a text are balanced
split_bill|total, people, tip|splits a bill with a tip among people
next_weekday|date|returns the next day that is not on a weekend
"""

STUBS = {
    "python": 'def %name%(%args%):\n    """%Does%."""\n',
    "js": "/** %Does%. */\nfunction %camel%(%args%) {\n",
}

STUB_TASKS = r"""
Complete this %lang% function:\n\n%code%
%code%\n\nPlease finish this function.
Finish the function `%fn%`. It %does%.\n\n%code%
%code%\n\nComplete the code above and give one example of how to call it.
Here is the beginning of a %lang% function that %does%. Write the rest.\n\n%code%
Fill in the body of this function, with comments.\n\n%code%
"""

FUNCTION_TASKS = """
Write a %lang% function that %does%.
Write a %lang% function `%fn%` with the parameters %args%. It %does%.
Can you write a function in %lang% that %does%? Please add tests.
Write a %lang% function that %does%, and explain how it works.
i need a %lang% function which %does%
Show me two ways to write a %lang% function that %does%.
Write a %lang% program that asks the user for input and %does%.
"""

# ------------------------------------------------------------------------------------ extraction

# Kind of record -> its fields with their values, and ways to write it as a sentence.
RECORDS = {
    "sale": (
        {
            "sale": "{no:1000-9899}",
            "buyer": "{name} {surname}",
            "article": "{good}s",
            "amount": "{n:2-24}",
            "paid": "{p:$9.50-240.00}",
        },
        [
            "{buyer} paid {paid} for {amount} {article} (sale {sale}).",
            "Sale {sale}: {amount} {article} to {buyer} for {paid}.",
        ],
    ),
    "server event": (
        {
            "date": "2025-{mm:10-12}-{dd:10-28}",
            "time": "{t:00:00-23:50}:{s:10-59}",
            "level": "{l:INFO|WARNING|ERROR|DEBUG}",
            "module": "{m:auth|billing|cache|search|upload|queue|gateway|reports}",
            "event": "{e:login failed|job finished|file not found|retrying request|user created|"
            "timeout after 30 s|index rebuilt|quota reached|session expired|config reloaded}",
        },
        [
            "[{date} {time}] {level} {module}: {event}",
            "{date} {time} | {module} | {level} | {event}",
        ],
    ),
    "member": (
        {
            "name": "{name} {surname}",
            "age": "{n:18-79}",
            "city": "{city}",
            "profession": "{job}",
            "since": "{y:1998-2024}",
        },
        [
            "{name} is {age} years old, works in {city} ({profession}) and joined in {since}.",
            "{name}, {age}, {profession} from {city}, member since {since}.",
        ],
    ),
    "table reservation": (
        {
            "guest": "{surname}",
            "day": "{day}",
            "time": "{t:12:00-21:30}",
            "people": "{n:2-12}",
            "wish": "{w:window seat|high chair|quiet corner|outside|no wish|birthday cake}",
        },
        [
            "{day}, {time}: {guest}, {people} people, {wish}.",
            "The {guest} party wants a table for {people} on {day} at {time} ({wish}).",
        ],
    ),
    "invoice line": (
        {
            "invoice": "R-{no:200-999}",
            "company": "{surname} {k:Ltd|Inc|GmbH|and Sons|Partners}",
            "service": "{s:web design|cleaning|translation|repairs|catering|consulting|printing}",
            "hours": "{n:2-40}",
            "total": "{p:$120-2400/10}",
        },
        [
            "Invoice {invoice} to {company}: {hours} hours of {service}, {total} in total.",
            "{company} owes {total} for {service} ({hours} hours, invoice {invoice}).",
        ],
    ),
    "measurement": (
        {
            "station": "{town}",
            "time": "{t:05:00-22:00}",
            "temperature": "{c:-5-34}",
            "wind": "{w:2-60}",
            "sky": "{s:clear|cloudy|rain|fog|snow|overcast}",
        },
        [
            "{station} at {time}: {temperature} degrees, wind {wind} km/h, {sky}",
            "At {time} the station in {station} reported {sky}, {temperature} C and {wind} km/h.",
        ],
    ),
    "book": (
        {
            "title": "The {a:Silent|Golden|Last|Broken|Hidden|Winter|Paper|Distant} "
            "{b:Garden|River|Witness|Orchard|Harbour|Crown|Winter|Road}",
            "author": "{name} {surname}",
            "year": "{y:1921-2023}",
            "pages": "{n:90-720/5}",
            "genre": "{g:novel|crime|poetry|biography|travel|fantasy}",
        },
        [
            "{title} by {author} ({year}), {genre}, {pages} pages",
            "In {year}, {author} published {title}, {pages} pages long, filed under {genre}.",
        ],
    ),
    "flight": (
        {
            "flight": "{x:KX|ZA|QP|VL}{n:100-989}",
            "from": "{city}",
            "to": "{city2}",
            "departure": "{t:05:00-22:30}",
            "gate": "{g:A|B|C|D}{h:1-38}",
        },
        [
            "{flight} from {from} to {to} leaves at {departure} from gate {gate}.",
            "Flight {flight}, {from} - {to}, {departure}, gate {gate}",
        ],
    ),
    "product": (
        {
            "code": "{x:AB|CD|EF|GH}-{n:100-999}",
            "product": "{good}",
            "colour": "{c:red|blue|green|black|white|yellow|grey}",
            "stock": "{s:0-240}",
            "price": "{p:$1.20-89.00}",
        },
        [
            "{code}: {product}, {colour}, {stock} in stock, {price} each",
            "We have {stock} of the {colour} {product} ({code}) at {price}.",
        ],
    ),
    "shift": (
        {
            "employee": "{name} {surname}",
            "day": "{day}",
            "from": "{t:05:00-09:30}",
            "until": "{u:13:00-18:30}",
            "place": "{p:reception|kitchen|storeroom|counter|office|garden}",
        },
        [
            "{employee} works on {day} from {from} until {until} ({place}).",
            "{day} {from}-{until} {place}: {employee}",
        ],
    ),
}

# {format}: one of FORMATS; {data}: the records; {fields}, {first}, {last}: names of fields.
EXTRACTION_TASKS = r"""
Turn each {record} into {format}.\n\n{data}
{data}\n\nPut this into {format}.
{data}\n\nExtract the {fields} of every {record} as {format}.
Read the text and write {format} with the fields {fields}.\n\n{data}
Here is some data:\n\n{data}\n\nPlease give me {format}.
Please convert the following to {format}. Only the result, no comments.\n\n{data}
I need this as {format}:\n\n{data}
{data}\n\nMake {format} out of this, sorted by {first}.
Text:\n{data}\n\nList the {last} of each {record}. Then write everything as {format}.
"""

EXAMPLE_TASKS = r"""
Turn every line into JSON. Line one becomes\n{example}\n\nDo the same for:\n{data}
Example:\n{line}\n-> {example}\n\nNow these, in the same way:\n{data}
Convert the rest in the same way as the example.\n\n{line}\n{example}\n\n{data}
"""

FORMATS = (
    "a JSON array|JSON, one object per line|CSV with a header line|a Markdown table|"
    "a bullet list|a YAML list|a table|a numbered list"
)

# --------------------------------------------------------------------------------------- quoting

# A passage: sentences in their order, of which some are left out; ¶ begins a paragraph.
PASSAGES = """
The {x:library|town hall|school|theatre|post office} of {town} was opened in {y:1850-1960/5}. / It stands on {street}, next to a {z:chapel|garden|row of lime trees|small canal}. / The architect, {name} {surname}, had never designed a public building before. / Because money was short, the roof was covered with {r:tin|slate|wooden shingles} instead of copper. / ¶ / In {q:1962-1999} a fire destroyed the east wing, but nobody was hurt. / Volunteers collected {n:12-90},000 {currency} and repaired it within two years. / Some of the old {o:doors|benches|lamps|windows} were saved and are still in use. / ¶ / Today about {v:20-90},000 people visit the building every year. / Guided tours take place on the first {day} of each month.
Dear {name}, / thank you for your message of {d:2-27} {month}. / I am sorry that {object} {flaw}. / We have looked into the matter together with our colleagues in {city}. / ¶ / We can send you a new one within {n:2-9} working days, or give you your money back. / Please tell us which of the two you prefer. / You do not have to return the old one. / ¶ / We hope that you will remain our customer, and we have added a voucher for {v:5-25/5} {currency}. / Kind regards, {name2} {surname2}
All residents of {street} are asked to read this notice. / From {d:2-20} {month}, the water pipes under the road will be replaced. / The work will last about {n:2-8} weeks and will be done between {t:07:00-08:30} and {u:16:00-18:30}. / Cars must be parked on {street2} during this time. / ¶ / On {day} the water will be turned off for about {h:2-6} hours. / Please fill a few bottles before that. / The bus stop moves to the corner of {street3}. / ¶ / If you have questions, call {name} {surname} at the town office.
{woman} {surname} grew up on a farm near {town}, the youngest of {n:3-8} children. / She learned to read from {a:old newspapers|a cookbook|seed catalogues|a torn dictionary}. / At the age of {b:15-19} she moved to {city} and found work in a {c:print shop|hospital|factory|hotel kitchen}. / ¶ / In the evenings she studied {e:botany|astronomy|law|mathematics|drawing}, and after {f:4-9} years she passed the examination. / Her first book sold only {g:60-400/20} copies. / Her second was translated into {h:6-24} languages. / ¶ / She never bought a car and never owned a telephone. / When she was asked why, she said that people who wanted to talk to her knew where the bench was.
Every spring, thousands of {x:toads|cranes|storks|geese|salmon} pass through the valley of {town}. / They come from the south and stay for about {n:5-20} days. / The villagers close one lane of the road so that the animals are not disturbed. / ¶ / {name} {surname}, a {job}, started to count them in {y:1971-2010}. / In the first year there were only {a:200-900/50}. / Last year there were more than {b:2-9},000. / ¶ / Scientists believe that the clean water is the reason. / Others think that it is the quiet nights.
The {n:4-9}th meeting of the {x:chess club|choir|parents' council|cycling club|film club} took place on {d:2-27} {month}. / {a:11-38} members were present. / {name} {surname} read the report of the last year. / The club has {b:40-180} members, {c:3-17} more than a year ago. / ¶ / {name2} {surname2} proposed to raise the yearly fee from {e:10-20} to {f:22-30} {currency}. / After a long discussion the proposal was rejected. / It was agreed to look for a sponsor instead. / ¶ / The summer trip will go to {city}. / {name3} will book the coach.
To make {x:plum|apricot|cherry|apple|pear} jam, wash {n:1-4} kilograms of ripe fruit and remove the stones or cores. / Cut the fruit into small pieces and weigh it again. / Add half of that weight in sugar and the juice of {a:one lemon|two lemons}. / ¶ / Let everything stand for {h:2-10} hours, so that the sugar dissolves. / Then bring it to the boil and stir all the time. / After {m:10-25/5} minutes, put a drop on a cold plate. / If it does not run, the jam is ready. / ¶ / Fill it into clean jars and close them at once. / Kept in a cool place, it lasts for about {y:6-18} months.
On {day} morning, {a:two|three|four} {x:cows|goats|ponies|ostriches} escaped from a field near {town}. / They walked along {street} and stopped in front of a {shop}. / The owner, {name} {surname}, gave them water in a bucket. / "They were the most polite customers of the week," {name} said. / ¶ / The police closed the road for {n:20-55/5} minutes. / A farmer finally led the animals home with a bag of {b:apples|carrots|old bread}. / Nobody was hurt, but a flower bed will have to be planted again.
The {x:heater|coffee grinder|air pump|sewing machine|bread slicer} must stand on a flat, dry surface. / Do not place it near a window or a stove. / Before you use it for the first time, remove all stickers and wipe it with a damp cloth. / ¶ / Press the green button for {a:2-5} seconds until the light turns on. / A short beep means that it is ready. / If you hear {b:three|four|five} beeps, pull the plug and wait for {c:5-20/5} minutes. / ¶ / Clean the filter every {d:2-6} weeks. / Never use hot water or strong cleaners. / The guarantee lasts {e:2-5} years.
Yesterday I walked from {town} to {town2} for the first time. / The path follows an old {x:railway line|canal|stone wall|hedge} for {n:4-14} kilometres. / It was {w:windy|foggy|hot|cold but sunny}, and I met only {a:two|three|a few} people. / ¶ / Near the half-way point there is a {b:ruined mill|tiny chapel|wooden tower|spring}. / I ate my {c:sandwich|apple|cold pie} there and wrote a postcard to {name}. / A {e:dog|goat|boy with a bicycle|flock of sparrows} kept me company. / ¶ / I arrived at {t:15:00-18:30} with wet shoes. / Tomorrow I will take the bus.
The company {surname} {k:Foods|Textiles|Motors|Instruments} reported a profit of {n:2-48} million {currency} for the last year. / That is {a:3-18}% {b:more|less} than in the year before. / Sales in {city} and {city2} grew, while those in {city3} fell. / ¶ / "We are satisfied, but not surprised," said {name} {surname2}, who has led the company since {y:2009-2022}. / A new plant near {town} will open in {month}. / It will create {c:80-600/20} jobs. / ¶ / The shares rose by {d:1-6} percent after the news.
{man} was the only {job} in {town}, and everybody knew his {x:red hat|old van|loud laugh|green coat}. / He got up at {t:04:00-06:30}, fed the {y:cat|hens|dog}, and went to work without breakfast. / People said that he could {z:guess anyone's age|predict the rain|repair any radio|whistle every song}. / ¶ / One {day} in {month} he did not come. / {name} went to his house and found a note on the table. / It said: "Gone to see the sea. Back before the plums are ripe." / ¶ / The plums ripened, and fell, and nobody picked them. / Then, on the first cold evening, a light was on again.
Our {x:office|laboratory|studio|shop} moves to {street} {n:3-98} on {d:2-27} {month}. / Please pack your desk by {day} evening. / Boxes and tape are in the kitchen. / Write your name on every box, and mark fragile things in red. / ¶ / The movers come at {t:06:00-08:30}. / Plants can go with {name}, who has a van. / ¶ / The new building has {a:two|three|four} floors, a bicycle cellar and a canteen. / You get your new key from {name2} {surname} on the first morning. / The old keys must be returned by the end of the week.
Tea was brought to {city} in the {x:seventeenth|eighteenth|nineteenth} century. / At first it was sold only by {y:chemists|silk traders|bookshops}, and a small packet cost as much as a {z:pair of shoes|sheep|week's rent}. / ¶ / {name} {surname} opened the first tea room in {q:1782-1899}. / It had {n:4-12} tables and no sign above the door. / Guests were asked to leave their {a:swords|umbrellas|dogs|newspapers} outside. / ¶ / Coffee was not served there, and it still is not. / The room is now run by the {b:fifth|sixth|seventh} generation of the family.
Sleep has several stages, which repeat about every {n:80-100/5} minutes. / In the first one, the muscles relax and the heart slows down. / In deep sleep the body repairs itself and the brain is hard to wake. / ¶ / Dreams are most vivid in the last stage, when the eyes move quickly under the lids. / Adults spend about a {x:fifth|quarter} of the night in it, and babies much more. / ¶ / Light, noise and late meals disturb this order. / Experts therefore advise a dark room of about {a:16-19} degrees and the same bedtime every day.
Welcome to the {x:Hotel|Guest House|Inn} {surname}! / Breakfast is served from {t:06:00-07:30} until {u:09:30-11:00} on the ground floor. / The code for the wireless network is "{w:bluewhale|sunflower|paperboat|greenhill}{n:10-99}". / Towels are changed every {d:2|3|4} days. / ¶ / The sauna is open on {day} and {day2}. / Children under {a:10-16} may use it only with an adult. / Bicycles can be rented at the desk for {p:8-25} {currency} a day. / ¶ / On the day that you leave, please be out of your room by {v:10:00-12:00}. / If you break something, tell {name}, who will not be angry.
Dear diary, today was my first day at the {x:bank|museum|kindergarten|hospital|radio station} in {city}. / I got up at {t:05:00-07:00} because I was afraid to be late, and then I was {n:20-60/5} minutes too early. / My new boss is called {name} {surname} and laughs a lot. / ¶ / At noon everybody ate soup from the same big pot. / {name2} showed me how to use the {y:copier|coffee machine|telephone|alarm}. / I pressed the wrong button {a:two|three|four} times. / ¶ / In the afternoon I was allowed to do something alone. / It went well, but nobody noticed. / Tomorrow I will take a sandwich with me.
The {n:4-28}th {x:film|jazz|poetry|kite|puppet} festival of {town} begins on {d:1-27} {month}. / More than {a:30-190/10} artists from {b:7-29} countries will take part. / The opening takes place in the old {y:tannery|gym|brewery|fire station} at {t:17:00-20:30}. / ¶ / Tickets cost {p:6-40} {currency} and are sold at the {shop} on {street}. / Students pay half. / ¶ / This year the jury is led by {woman} {surname}. / She won the first prize herself in {z:1988-2019}. / "I only remember that it rained," she says. / There is a programme for children every morning.
{man} {surname} invented the folding {x:ladder|umbrella stand|canoe|piano stool} in {y:1868-1939}. / He was a {job} by trade and had no workshop, so he built the first one in his bedroom. / It was too wide for the door and had to be taken apart again. / ¶ / A merchant from {city} saw it by chance and ordered {n:20-90/10}. / Three years later {surname} employed {a:14-70} people. / He never applied for a patent, because he found the form too long. / ¶ / His competitors were grateful and sent him a {z:ham|clock|silver tray} every winter. / The original is kept in a school in {town}, where it is still used.
Rules of the {x:reading room|shared kitchen|climbing hall|tennis court} / Please write your name into the list when you come and when you leave. / Nobody may stay for more than {n:2-6} hours. / Food is allowed only at the {a:long table|entrance|window}. / ¶ / Whatever you take must be put back before {t:18:00-21:55}. / Lost things are kept for {b:10-60/10} days and are then given to charity. / ¶ / If something is broken, tell {name} {surname} or leave a note in the red box. / Guests are welcome on {day}. / These rules were agreed on {d:1-28} {month} by {c:12-40} votes to {e:2-9}.
The lake of {town} is {n:3-24} kilometres long and up to {a:30-140} metres deep. / Its water is {x:green|dark blue|almost black|very clear}, and it freezes only in hard winters. / ¶ / In {y:1903-1958} a steamer called the {z:Marianne|Evening Star|Good Hope|Swallow} sank near the northern shore. / All {b:14-80} passengers were saved by fishermen. / The ship was found {c:40-70} years later by a diver named {name} {surname}. / ¶ / Its bell hangs in the school today. / It is rung on the last day before the holidays.
"""  # noqa: E501

QUOTING_TASKS = r"""
Repeat the following text exactly.\n\n{text}
{text}\n\nCopy the text above without changing anything.
{text}\n\nQuote the first paragraph, then say in one sentence what the rest is about.
{text}\n\nQuote the last paragraph word for word.
Summarise the following text in two sentences and quote the most important one.\n\n{text}
Copy this text and correct any mistakes that you find.\n\n{text}
{text}\n\nWrite this again, but change every number to a word.
{text}\n\nRewrite the text in the present tense. Change nothing else.
Please rewrite the following, but replace the word "{old}" with "{new}" everywhere.\n\n{text}
{text}\n\nPrint the text again with "{new}" instead of "{old}".
{text}\n\nWhich sentences contain numbers? Quote them.
{text}\n\nList the main points and give a quotation for each.
Read this text aloud to me, please, exactly as it is written:\n\n{text}
{text}\n\nRepeat the text and add one more sentence at the end.
Here is a text:\n\n"{text}"\n\nRepeat it word for word and translate the first sentence into French.
{text}\n\nPut each sentence of this text on its own line.
Write the text below again as a bullet list. Use the original sentences.\n\n{text}
{text}\n\nAnswer with quotations from the text only: What happened, where, and when?
"""

SWAPS = (
    "people:persons|small:little|old:ancient|first:earliest|day:evening|new:modern|will:shall|"
    "every:each|about:roughly|never:rarely|after:before|and:as well as|but:although|also:too"
)

# ----------------------------------------------------------------------------------- translation

TRANSLATIONS = {
    "English": """
My sister lives in {city} and works as a {job}.
The bus was late again, so we walked home in the rain.
Could you please send me the documents by {day}?
We would like to book a room with two beds for {n:2-6} nights.
The children are playing in the garden with the neighbour's dog.
I have been learning the guitar for two years, but I still make mistakes.
Yesterday {name} bought a bicycle and rode it to school.
In winter it gets dark early and the streets are quiet.
My grandfather tells the same story every Sunday, and we always laugh.
If you want to come with us, bring a warm coat.
The doctor said that I should drink more water and sleep longer.
Our flight to {city} leaves at {t:06:00-21:30}.
There is a small bookshop next to the station.
I am sorry that I did not answer your letter.
The soup is too salty, but the bread is excellent.
She opened the window and listened to the birds.
How much does the blue shirt cost?
The museum is free on the first Sunday of the month.
He forgot his keys and had to wait outside for an hour.
We spent our holidays by the sea with {name} and her parents.
The teacher asked a question, but nobody knew the answer.
I would rather read a good book than watch television.
Turn left after the bridge and go straight on to the church.
They are building a new hospital near {town}.
Thank you very much for the flowers and the kind words.
The cat sleeps on the sofa all day and goes out at night.
Please do not touch the paintings.
Next year we want to move to a bigger flat.
It was so cold that the lake froze.
My phone is broken; can I use yours?
Before the exam I was nervous, but then everything went well.
You should try the fish here, it is caught every morning.
""",
    "Spanish": """
Mi hermana vive en {city} y trabaja en un hospital.
Ayer fuimos al cine y después cenamos en casa de unos amigos.
¿Podrías enviarme los documentos antes del viernes?
Los niños juegan en el jardín con el perro del vecino.
Hace mucho calor y nadie quiere salir de casa.
El tren llegó con una hora de retraso.
Me gustaría reservar una habitación para {n:2-6} noches.
Mi abuelo cuenta siempre la misma historia.
En invierno las calles están tranquilas y oscuras.
Si vienes con nosotros, trae un abrigo.
El médico me dijo que tenía que dormir más.
Estoy aprendiendo a tocar la guitarra desde hace dos años.
La sopa está demasiado salada, pero el pan es muy bueno.
Ella abrió la ventana y escuchó los pájaros.
¿Cuánto cuesta la camisa azul?
Perdona que no haya contestado a tu carta.
El museo es gratuito el primer domingo del mes.
Olvidó las llaves y tuvo que esperar en la calle.
Pasamos las vacaciones junto al mar con {name} y sus padres.
Gire a la izquierda después del puente y siga todo recto.
Van a construir una escuela nueva cerca del parque.
Muchas gracias por las flores y por tus palabras.
El gato duerme todo el día en el sofá.
El año que viene queremos mudarnos a un piso más grande.
Antes del examen estaba nerviosa, pero todo salió bien.
""",
    "French": """
Ma sœur habite à {city} et travaille dans un hôpital.
Hier, nous sommes allés au cinéma avec des amis.
Pourriez-vous m'envoyer les documents avant vendredi ?
Les enfants jouent dans le jardin avec le chien du voisin.
Il fait très chaud et personne ne veut sortir.
Le bus est arrivé avec une heure de retard.
Je voudrais réserver une chambre pour {n:2-6} nuits.
Mon grand-père raconte toujours la même histoire.
En hiver, les rues sont calmes et sombres.
Si tu viens avec nous, prends un manteau.
Le médecin m'a dit que je devais dormir davantage.
J'apprends la guitare depuis deux ans, mais je fais encore des fautes.
La soupe est trop salée, mais le pain est excellent.
Elle a ouvert la fenêtre et écouté les oiseaux.
Combien coûte la chemise bleue ?
Je suis désolé de ne pas avoir répondu à ta lettre.
Le musée est gratuit le premier dimanche du mois.
Il a oublié ses clés et a dû attendre dehors.
Nous avons passé les vacances au bord de la mer avec {name}.
Tournez à gauche après le pont et continuez tout droit.
On construit une nouvelle école près du parc.
Merci beaucoup pour les fleurs et pour tes mots gentils.
Le chat dort toute la journée sur le canapé.
L'année prochaine, nous voulons déménager dans un appartement plus grand.
Avant l'examen j'étais nerveuse, mais tout s'est bien passé.
""",
    "German": """
Meine Schwester wohnt in {city} und arbeitet in einem Krankenhaus.
Gestern waren wir im Kino und haben danach bei Freunden gegessen.
Könnten Sie mir die Unterlagen bis Freitag schicken?
Die Kinder spielen im Garten mit dem Hund des Nachbarn.
Es ist sehr heiß, und niemand will aus dem Haus gehen.
Der Bus kam mit einer Stunde Verspätung an.
Ich möchte ein Zimmer für {n:2-6} Nächte reservieren.
Mein Großvater erzählt immer dieselbe Geschichte.
Im Winter sind die Straßen still und dunkel.
Wenn du mitkommst, nimm einen Mantel mit.
Der Arzt hat gesagt, dass ich mehr schlafen soll.
Ich lerne seit zwei Jahren Gitarre, aber ich mache noch Fehler.
Die Suppe ist zu salzig, aber das Brot schmeckt sehr gut.
Sie öffnete das Fenster und hörte den Vögeln zu.
Wie viel kostet das blaue Hemd?
Es tut mir leid, dass ich deinen Brief nicht beantwortet habe.
Das Museum ist am ersten Sonntag im Monat kostenlos.
Er hatte seine Schlüssel vergessen und musste draußen warten.
Wir haben die Ferien mit {name} am Meer verbracht.
Biegen Sie nach der Brücke links ab und fahren Sie geradeaus.
Neben dem Park wird eine neue Schule gebaut.
Vielen Dank für die Blumen und die freundlichen Worte.
Die Katze schläft den ganzen Tag auf dem Sofa.
Nächstes Jahr wollen wir in eine größere Wohnung ziehen.
Vor der Prüfung war ich nervös, aber dann ging alles gut.
""",
    "Italian": """
Mia sorella vive a {city} e lavora in un ospedale.
Ieri siamo andati al cinema e poi abbiamo cenato da amici.
Potrebbe inviarmi i documenti entro venerdì?
I bambini giocano in giardino con il cane del vicino.
Fa molto caldo e nessuno vuole uscire di casa.
L'autobus è arrivato con un'ora di ritardo.
Vorrei prenotare una camera per {n:2-6} notti.
Mio nonno racconta sempre la stessa storia.
In inverno le strade sono tranquille e buie.
Se vieni con noi, porta un cappotto.
Il medico mi ha detto che devo dormire di più.
Studio la chitarra da due anni, ma faccio ancora degli errori.
La zuppa è troppo salata, ma il pane è ottimo.
Lei aprì la finestra e ascoltò gli uccelli.
Quanto costa la camicia blu?
Mi dispiace di non aver risposto alla tua lettera.
Il museo è gratuito la prima domenica del mese.
Ha dimenticato le chiavi e ha dovuto aspettare fuori.
Abbiamo passato le vacanze al mare con {name} e i suoi genitori.
Giri a sinistra dopo il ponte e vada sempre dritto.
Stanno costruendo una nuova scuola vicino al parco.
Grazie mille per i fiori e per le parole gentili.
Il gatto dorme tutto il giorno sul divano.
L'anno prossimo vogliamo trasferirci in un appartamento più grande.
Prima dell'esame ero nervosa, ma poi è andato tutto bene.
""",
}

TRANSLATION_TASKS = r"""
Translate into {to}: {text}
Translate this from {source} into {to}.\n\n{text}
{text}\n\nTranslate this into {to}, please.
How do you say this in {to}? "{text}"
What is this in {to}?\n\n{text}
I got this message in {source}. What does it say in {to}?\n\n{text}
Give me the {to} translation and explain the grammar of one sentence.\n\n{text}
"{text}"\n\nPlease write this in {to}.
Translate each sentence into {to}, one per line.\n\n{text}
I am learning {foreign}. Show me this text in {to}, with the original.\n\n{text}
"""
